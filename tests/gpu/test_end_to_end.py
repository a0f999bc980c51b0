"""Compact layers and whole training runs on the GPU where there is one; elsewhere the same bodies, tiny, on the CPU."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW

pytest.importorskip("transformers")

from grass.memory.llama import llama_config
from training.run.models import build_llama

pytestmark = pytest.mark.gpu
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MODEL, STEPS, BATCH, LENGTH = ("60m", 60, 16, 256) if CUDA else ("1m", 12, 4, 16)
OPTIONS = {"lr": 3e-3, "update_interval": 5, "selection": "multinomial_norm", "state_policy": "bank"}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(CUDA)  # on CUDA some of torch's own operations add in any order otherwise
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_compact_gradients_are_rows_of_the_full_one(dim, dtype) -> None:
    torch.manual_seed(0)
    wide, narrow, tokens = (512, 384, 1000) if CUDA else (48, 36, 20)
    plain = nn.Linear(wide, narrow, device=DEVICE, dtype=dtype)
    layer = nn.Sequential(nn.Linear(wide, narrow, device=DEVICE, dtype=dtype))
    layer[0].load_state_dict(plain.state_dict())
    grass.compact(layer, rank=0.25, explore=0, dim=dim, dtype=torch.float32, targets="all-linear")
    inputs = [torch.randn(tokens, wide, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    weights = torch.randn(tokens, narrow, device=DEVICE, dtype=dtype)
    for module, x in zip((plain, layer), inputs, strict=True):
        (module(x) * weights).sum().backward()
    expected = (weights.double().t() @ inputs[0].detach().double()).index_select(dim, layer[0].selected)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3  # of the norm: one rounding of each element
    assert (layer[0].active.grad.double() - expected).norm() < tolerance * expected.norm()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def made(dtype: torch.dtype, **options) -> tuple[nn.Module, GrassAdamW]:
    """A LLaMA in compact mode and its optimizer."""
    config = llama_config(MODEL, vocab_size=256, max_seq_len=LENGTH)
    model = build_llama(config, seed=0, dtype=dtype, device=DEVICE)
    grass.compact(model, rank=0.25, explore=0, dtype=None if options.get("stochastic_rounding") else torch.float32)
    return model, GrassAdamW(model, **{**OPTIONS, **options})


def train(model: nn.Module, optimizer: GrassAdamW, steps: range) -> list[float]:
    """Losses on sequences whose tokens step by a stride of their own."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(64, (BATCH, 1), generator=generator)
        strides = torch.randint(1, 5, (BATCH, 1), generator=generator)
        ids = ((starts + strides * torch.arange(LENGTH)) % 64).to(DEVICE)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"moment_dtype": "8bit"}, {"stochastic_rounding": True, "moment_dtype": "bfloat16"}], ids=str
)
def test_learns_and_resumes_bit_for_bit(options) -> None:
    model, optimizer = made(torch.bfloat16, **options)
    half = STEPS // 2 + 1  # between two refreshes
    losses = train(model, optimizer, range(half))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    losses += train(model, optimizer, range(half, STEPS))
    assert losses[-1] < (0.5 if CUDA else 0.97) * losses[0]
    file.seek(0)
    weights, state = torch.load(file, weights_only=True, map_location=DEVICE)
    other, resumed = made(torch.bfloat16, **options)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert train(other, resumed, range(half, STEPS)) == losses[half:]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.skipif(not CUDA, reason="no GPU; tests/kernels/test_training.py does this in the interpreter")
def test_kernels_train_as_torch_does(monkeypatch) -> None:
    losses = []
    for implementation in ("triton", "torch"):
        monkeypatch.setenv("GRASS_KERNELS", implementation)
        losses.append(train(*made(torch.float32), range(STEPS)))
    assert abs(losses[0][4] - losses[1][4]) < 1e-3 * losses[1][4]
    assert abs(losses[0][-1] - losses[1][-1]) < 0.1 * losses[1][-1]
