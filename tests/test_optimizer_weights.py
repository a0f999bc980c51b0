"""Weights and gradients of other layouts and dtypes than a contiguous fp32 matrix."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from grass import PAPER, GrassAdamW
from tests.reference import gradients_for, run

OPTIONS = dict(PAPER, lr=1e-2, rank=2, update_interval=3, selection="multinomial_norm", weight_decay=0.1)


@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("gradient_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_conv_weights(dim: int, weight_format: torch.memory_format, gradient_format: torch.memory_format) -> None:
    """A convolution is the ``(out, in * height * width)`` matrix whatever its memory format."""
    start = torch.randn(6, 3, 2, 2)
    conv = Parameter(start.clone(memory_format=weight_format))
    flat = Parameter(start.reshape(6, -1).clone())
    options = {**OPTIONS, "selection": "top_r", "dim": dim}
    first, second = GrassAdamW([conv], **options), GrassAdamW([flat], **options)
    for (step,) in gradients_for([conv], 7):
        conv.grad = step.float().contiguous(memory_format=gradient_format)
        flat.grad = step.float().reshape(6, -1).clone()
        first.step()
        second.step()
    torch.testing.assert_close(conv.reshape(6, -1), flat, rtol=1e-5, atol=1e-6)  # norms sum in another order
    assert conv.is_contiguous(memory_format=weight_format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_weights_have_fp32_moments(dtype: torch.dtype) -> None:
    weight = Parameter(torch.randn(6, 8).to(dtype))
    optimizer = GrassAdamW([weight], **OPTIONS)
    run(optimizer, [weight], gradients_for([weight], 4))
    state = optimizer.state[weight]
    assert weight.dtype == dtype
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert state["indices"].dtype == torch.int64


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_non_contiguous_weights(dim: int) -> None:
    """A transposed weight is updated where it lies, not in a copy."""
    start = torch.randn(6, 8)
    plain, transposed = Parameter(start.clone()), Parameter(start.T.contiguous().T)
    assert not transposed.is_contiguous()
    options = {**OPTIONS, "dim": dim}
    gradients = gradients_for([plain], 7)
    run(GrassAdamW([plain], **options), [plain], gradients)
    run(GrassAdamW([transposed], **options), [transposed], gradients)
    torch.testing.assert_close(transposed, plain, rtol=1e-5, atol=1e-6)  # fp32: norms may sum in another order


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"selection": "uniform", "replacement": True}], ids=str)
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
def test_gradients_are_left_alone(policy: str, options: dict) -> None:
    ours = [Parameter(torch.randn(shape)) for shape in [(6, 8), (9, 4), (4, 3, 2, 2), (7,)]]
    optimizer = GrassAdamW(ours, **{**OPTIONS, "state_policy": policy, **options})
    for step in gradients_for(ours, 4):
        run(optimizer, ours, [step])
        for parameter, gradient in zip(ours, step, strict=True):
            assert torch.equal(parameter.grad, gradient.float())
