"""Counter-based bits and stochastic rounding: the twin's distribution, and the kernel bit for bit."""

import pytest
import torch
from scipy import stats

from grass.kernels import make_key, random_bits, round_stochastically
from grass.kernels.language import jit, tl
from grass.kernels.random_bits import Stream, random_bits_kernel, round_stochastically_kernel

from .conftest import DEVICE

HALF = [torch.bfloat16, torch.float16]


@jit
def _round_kernel(out, bits_out, x, key, start, stream: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n).to(tl.int64)
    bits = random_bits_kernel(i + start, tl.load(key), stream)
    tl.store(bits_out + i, bits.to(tl.int64))
    tl.store(out + i, round_stochastically_kernel(tl.load(x + i), out.dtype.element_ty, bits))


def awkward_values() -> torch.Tensor:
    spread = torch.randn(1018) * torch.logspace(-12, 38, 1018)
    return torch.cat([spread, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0])])


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("start", [0, 2**31 - 500, 2**40 + 3])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_kernel_gives_the_same_bits(dtype, start, stream) -> None:
    key, x = make_key(3, 1, 7), awkward_values().to(DEVICE)
    out, bits = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int64)
    _round_kernel[(1,)](out, bits, x, torch.tensor([key], device=DEVICE), start, stream, 1024)
    expected = random_bits(start + torch.arange(1024, device=DEVICE), key, stream)
    assert torch.equal(bits, expected)
    torch.testing.assert_close(out, round_stochastically(x, dtype, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_picks_a_neighbour_and_keeps_the_mean(dtype) -> None:
    x = torch.randn(4096) * torch.logspace(-8, 4, 4096)
    draws = torch.stack(
        [round_stochastically(x, dtype, random_bits(torch.arange(4096) + 4096 * j, 9)).double() for j in range(1000)]
    )
    low, high = draws.min(0).values, draws.max(0).values
    assert (torch.nextafter(low.to(dtype), torch.tensor(float("inf"), dtype=dtype)).double() >= high).all()
    uncertain = high > low
    assert ((low <= x) & (x <= high))[uncertain].all()
    assert uncertain.float().mean() > 0.9
    share = (x.double() - low)[uncertain] / (high - low)[uncertain]
    z = (draws.mean(0) - x)[uncertain] / ((high - low)[uncertain] * (share * (1 - share) / 1000).sqrt())
    assert z.square().mean().sub(1).abs() < 0.15
    assert z.mean().abs() < 4 / uncertain.sum().sqrt()


def test_exact_values_stay() -> None:
    for dtype in HALF:
        x = awkward_values().to(dtype)
        finite = x[x.isfinite()]
        assert torch.equal(
            round_stochastically(finite.float(), dtype, random_bits(torch.arange(len(finite)), 1)), finite
        )


def test_bits_are_uniform_and_uncorrelated() -> None:
    n = 1 << 16
    words = [random_bits(torch.arange(n), make_key(*parts)) for parts in ((0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1))]
    words.append(random_bits(torch.arange(n), make_key(0, 0, 1), 1))
    words.append(random_bits(torch.arange(n) + 2**33, make_key(0, 0, 1)))
    for word in words:
        assert stats.chisquare(torch.bincount(word >> 24, minlength=256).numpy()).pvalue > 1e-3
        assert stats.chisquare(torch.bincount(word & 255, minlength=256).numpy()).pvalue > 1e-3
    uniform = torch.stack([*words, words[0].roll(1), words[0].roll(64)]).double() / 2**32
    correlation = torch.corrcoef(uniform) - torch.eye(len(uniform))
    assert correlation.abs().max() < 5 / n**0.5
    assert len({make_key(a, b, c) for a in range(-8, 8) for b in range(16) for c in range(16)}) == 4096


def test_bits_of_different_counters_differ() -> None:
    """So the rows with the largest bits are always one set."""
    for key in (0, make_key(3, 1, 7)):
        assert random_bits(torch.arange(1 << 20), key, Stream.DRAW).unique().numel() == 1 << 20
