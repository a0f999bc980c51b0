"""``shrink_``: the kernel equals its twin bit for bit, which is right in the mean."""

import pytest
import torch

from grass.kernels import make_key, shrink_

from .conftest import DEVICE, LAYOUTS, far_apart, laid_out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (3, 2100), (2100, 3)], ids=str)
def test_equals_the_twin(shape, dtype, layout, run) -> None:
    matrix = laid_out(torch.randn(shape).to(dtype), layout)
    results = []
    for implementation in ("triton", "torch"):
        for key in (5, 6):
            results.append(matrix.clone())
            run(implementation, shrink_, [results[-1]], 0.97, [make_key(key)])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert matrix.numel() < 10 or not torch.equal(results[0], results[1])


def test_is_right_in_the_mean(run) -> None:
    """A factor closer to 1 than half of bfloat16's spacing, which rounding to nearest would lose."""
    for implementation in ("triton", "torch"):
        matrix = torch.ones(64, 64, device=DEVICE).bfloat16()
        for step in range(30):
            run(implementation, shrink_, [matrix], 1 - 1e-4, [make_key(step)])
        assert abs(matrix.float().mean().item() - (1 - 1e-4) ** 30) < 4e-4


def test_values_that_are_no_numbers_stay(run) -> None:
    for implementation in ("triton", "torch"):
        matrix = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0]], device=DEVICE).bfloat16()
        run(implementation, shrink_, [matrix], 0.5, [1])
        assert matrix[0].tolist()[1:] == [float("inf"), -float("inf"), 0.0]
        assert matrix[0, 0].isnan()


def test_takes_tensors_of_any_dimensions(run) -> None:
    """As weights of experts are: the counter is an element's place."""
    whole = torch.randn(3, 4, 5, device=DEVICE).bfloat16()
    flat, turned = whole.clone().view(-1, 5), whole.transpose(0, 2).contiguous().transpose(0, 2)
    for tensor in (whole, flat, turned):
        run("triton", shrink_, [tensor], 0.97, [8])
    assert torch.equal(whole.view(-1, 5), flat)
    assert torch.equal(whole, turned)


def test_offsets_past_int32(run) -> None:
    matrix = far_apart(3, 17, torch.bfloat16)
    matrix.copy_(torch.randn(3, 17))
    expected = matrix.clone()
    run("torch", shrink_, [expected], 0.9, [4])
    run("triton", shrink_, [matrix], 0.9, [4])
    assert torch.equal(matrix.clone(), expected)
