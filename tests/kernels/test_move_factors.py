"""``move_factors``: the kernel and its twin against float64."""

import itertools

import pytest
import torch

from grass.kernels import move_factors, random_bits
from grass.kernels.moment_codes import decode_moment, encode_moment

from .conftest import DEVICE, DTYPES, LAYOUTS, alone, far_apart, laid_out

BETAS, EPS = (0.9, 0.999), 1e-8


def problem(shape, r, dim, dtype, layout, moment_dtype):
    """Both moments, the full gradient, indices, row ages."""
    indices = torch.randperm(shape[dim])[:r].sort().values.to(DEVICE)
    grad = laid_out(torch.randn(shape).to(dtype), layout)
    moments = [laid_out(f(shape).narrow(dim, 0, r).to(moment_dtype), layout) for f in (torch.randn, torch.rand)]
    return *moments, grad, indices, torch.randint(1, 2000, (r,)).float().to(DEVICE)


def in_float64(exp_avg, exp_avg_sq, compact, steps, dim, eps=EPS):
    """The formulas of the docstring, on float64 copies."""
    ages = steps.double().unsqueeze(1 - dim) if isinstance(steps, torch.Tensor) else float(steps)
    first, second = (1 - torch.tensor(beta, dtype=torch.float64) ** ages for beta in BETAS)
    direction = exp_avg.double() / first / ((exp_avg_sq.double() / second).sqrt() + eps)
    across = compact.double().norm(dim=dim)
    factors = torch.where(across > 0, direction.norm(dim=dim) / across, 0.0)
    lengths = direction.norm(dim=1 - dim)
    return factors.float(), lengths.float(), lengths.mean().float()


CASES = [
    *itertools.product([(1, 1), (7, 13), (67, 131)], DTYPES, LAYOUTS, [torch.float32], [True, False], [True]),
    *itertools.product([(19, 41)], DTYPES, LAYOUTS, [torch.bfloat16], [True], [False]),
    *itertools.product([(3, 2100), (2100, 3)], [torch.bfloat16], ["rows", "columns"], [torch.float32], [True], [False]),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shape", "dtype", "layout", "moment_dtype", "per_row", "gather"), CASES, ids=str)
def test_equals_float64(shape, dtype, layout, moment_dtype, per_row, gather, dim, run) -> None:
    r = max(1, shape[dim] * 2 // 3)
    *moments, grad, indices, ages = problem(shape, r, dim, dtype, layout, moment_dtype)
    steps, compact = ages if per_row else 17, grad.index_select(dim, indices)
    expected = in_float64(*moments, compact, steps, dim)
    for implementation in ("triton", "torch"):
        which = {"indices": indices} if gather else {}
        ours = run(implementation, alone(move_factors), *moments, grad if gather else compact, steps, dim=dim, **which)
        for result, exact in zip(ours, expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-5, atol=0)  # some thousand float32 squares


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (37, 131), (3, 700)], ids=str)
def test_codes_of_8_bits_are_decoded(shape, dim, gather, layout, run) -> None:
    """What comes of codes is what comes of the moments that they stand for."""
    r = max(1, shape[dim] * 2 // 3)
    first, second, grad, indices, ages = problem(shape, r, dim, torch.bfloat16, layout, torch.float32)
    bits = random_bits(torch.arange(first.numel(), device=DEVICE), 3)
    codes, scales = zip(encode_moment(first, True, bits), encode_moment(second.sqrt(), False, bits), strict=True)
    decoded = decode_moment(codes[0], scales[0], True), decode_moment(codes[1], scales[1], False).square()
    own = (grad, {"indices": indices}) if gather else (grad.index_select(dim, indices), {})
    for implementation in ("triton", "torch"):
        expected = run(implementation, alone(move_factors), *decoded, own[0], ages, dim=dim, **own[1])
        ours = run(implementation, alone(move_factors), *codes, own[0], ages, dim=dim, scales=scales, **own[1])
        for result, exact in zip(ours, expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)  # the same values, perhaps in other tiles


def test_codes_must_be_dense(run) -> None:
    codes, scale = torch.zeros(4, 8, dtype=torch.uint8, device=DEVICE)[:, ::2], torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match=r"exp_avg has codes with strides \(8, 2\), must be dense"):
        run("triton", alone(move_factors), codes, codes, torch.ones(4, 4, device=DEVICE), 1, scales=(scale, scale))


def test_columns_without_gradient_have_no_factor(run) -> None:
    """Neither has one whose moments are zero too, with ``eps=0`` and padding beside it; other columns are finite."""
    moments, grad = [torch.ones(5, 7, device=DEVICE) for _ in range(2)], torch.randn(5, 7, device=DEVICE)
    grad[:, 3] = 0
    for implementation in ("triton", "torch"):
        factors, lengths, mean = run(implementation, alone(move_factors), *moments, grad, 3, eps=0.0)
        assert factors[3] == 0
        assert (factors[torch.arange(7) != 3] > 0).all()
        expected = in_float64(*moments, grad, 3, 0, eps=0.0)
        for result, exact in zip((factors, lengths, mean), expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-5, atol=0)


def test_same_in_every_run(run) -> None:
    *moments, grad, _, ages = problem((300, 70), 300, 0, torch.bfloat16, "rows", torch.float32)
    first, again = (run("triton", alone(move_factors), *moments, grad, ages) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_float64_stays_float64() -> None:
    moments = torch.randn(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    results = alone(move_factors)(*moments, torch.randn(3, 5, dtype=torch.float64), 4)
    assert [t.dtype for t in results] == [torch.float64] * 3


def test_offsets_past_int32(run) -> None:
    grad = far_apart(3, 17, torch.bfloat16)
    grad.copy_(torch.randn(3, 17))
    moments, indices = [torch.rand(2, 17, device=DEVICE) for _ in range(2)], torch.tensor([2, 0], device=DEVICE)
    ours = run("triton", alone(move_factors), *moments, grad, 5, indices=indices)
    for result, exact in zip(ours, in_float64(*moments, grad[indices], 5, 0), strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=0)


def test_refused() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match="dim=2"):
        alone(move_factors)(x, x, x, 1, dim=2)
    with pytest.raises(ValueError, match=r"exp_avg_sq has shape \(4, 5\), must be \(4, 6\)"):
        alone(move_factors)(x, x[:, :5], x, 1)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(4, 6\), must be \(4, 2\)"):
        alone(move_factors)(x, x, x, 1, dim=1, indices=torch.tensor([0, 1]))
