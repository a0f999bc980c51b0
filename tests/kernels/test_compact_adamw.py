"""``compact_adamw_``: the kernel and its twin against float64, in every combination of types, layouts and flags."""

import itertools

import pytest
import torch

from grass.kernels import compact_adamw_, make_key
from grass.kernels.compact_adamw import _correction
from grass.kernels.language import jit, tl
from grass.selection.projector import Projector
from tests.stepping.row_step import compact_adamw

from .conftest import DEVICE, DTYPES, LAYOUTS, TOLERANCE, alone, far_apart, laid_out

HYPER = {"betas": (0.9, 0.999), "eps": 1e-8}


def problem(shape, r, dim, dtype, layout="rows", row_dtype=None, moment_dtype=torch.float32):
    """Weight, indices, full gradient, moments, row ages, rows."""
    weight = laid_out(torch.randn(shape).to(dtype), layout)
    indices = torch.randperm(shape[dim])[:r].sort().values.to(DEVICE)
    grad = laid_out(torch.randn(shape).to(dtype), layout)
    moments = [laid_out(f(shape).narrow(dim, 0, r).to(moment_dtype), layout) for f in (torch.randn, torch.rand)]
    rows = None if row_dtype is None else weight.index_select(dim, indices).to(row_dtype)
    return weight, indices, grad, *moments, torch.randint(1, 2000, (r,)).float().to(DEVICE), rows


def in_float64(weight, indices, grad, exp_avg, exp_avg_sq, steps, dim, rows, step_size, shrink):
    """The step by :func:`tests.stepping.row_step.compact_adamw`, on float64 copies; returns new rows and moments."""
    weight, exp_avg, exp_avg_sq = weight.double(), exp_avg.double(), exp_avg_sq.double()
    if rows is not None:
        weight.index_copy_(dim, indices, rows.double())
    projector = Projector(indices, None, dim)
    age = steps.double() if isinstance(steps, torch.Tensor) else int(steps)
    decay = {"weight_decay": (1 - shrink) / step_size}
    compact = projector.gather(grad.double())
    compact_adamw(weight, projector, compact, exp_avg, exp_avg_sq, age, lr=step_size, **HYPER, **decay)
    return weight.index_select(dim, indices), exp_avg, exp_avg_sq


CASES = [
    *itertools.product(
        [(1, 1), (7, 13), (37, 131), (5, 29)], [torch.float32], ["rows"], [None, torch.float32], [True, False]
    ),
    *itertools.product([(19, 41)], DTYPES, LAYOUTS, [None, torch.float32], [True]),
    *itertools.product([(3, 2100), (2100, 3)], [torch.bfloat16], ["rows", "columns"], [torch.bfloat16], [False]),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shape", "dtype", "layout", "row_dtype", "per_row"), CASES, ids=str)
def test_equals_float64(shape, dtype, layout, row_dtype, per_row, dim, run) -> None:
    r = {5: 1, 29: 29}.get(shape[dim], shape[dim] if shape[dim] < 8 else shape[dim] // 3)
    weight, indices, grad, exp_avg, exp_avg_sq, ages, rows = problem(shape, r, dim, dtype, layout, row_dtype)
    steps = ages if per_row else 17
    numbers = {"step_size": 0.1, "shrink": 0.9}
    expected = in_float64(weight, indices, grad, exp_avg, exp_avg_sq, steps, dim, rows, **numbers)
    untouched = weight.clone()
    full = rows is None
    for implementation in ("triton", "torch"):
        w, m, v = weight.clone(), exp_avg.clone(), exp_avg_sq.clone()
        own = None if rows is None else rows.clone()
        g = grad if full else grad.index_select(dim, indices)
        arguments = (w, indices, g, m, v, steps)
        run(implementation, alone(compact_adamw_), *arguments, dim=dim, rows=own, gather_grad=full, **numbers, **HYPER)
        values = w.index_select(dim, indices) if own is None else own
        for ours, exact in zip((values, m, v), expected, strict=True):
            rtol, atol = TOLERANCE[ours.dtype]
            torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=rtol, atol=atol)
        if own is not None:
            assert torch.equal(w.index_select(dim, indices), own.to(dtype))
        rest = torch.ones(shape[dim], dtype=torch.bool, device=DEVICE).index_fill(0, indices, False)
        assert torch.equal(w.transpose(0, dim)[rest], untouched.transpose(0, dim)[rest])


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_dtype", [None, torch.bfloat16], ids=["own-values", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_draws_as_the_twin_does(dtype, row_dtype, moment_dtype, run) -> None:
    """Both may differ by float32's last bit before rounding, so a few elements fall on the other side."""
    row_dtype = None if row_dtype is None else dtype
    weight, indices, grad, *moments, ages, rows = problem((37, 131), 11, 0, dtype, "rows", row_dtype, moment_dtype)
    g = grad[indices]
    results = {}
    for name, implementation, key in [("triton", "triton", 5), ("torch", "torch", 5), ("again", "triton", 6)]:
        tensors = [t.clone() for t in (weight, *moments)]
        own = None if rows is None else rows.clone()
        options = {
            "step_size": 1e-3,
            "shrink": 0.999,
            "key": make_key(key),
            "moment_key": make_key(key),
            "rows": own,
            **HYPER,
        }
        run(implementation, alone(compact_adamw_), tensors[0], indices, g, *tensors[1:], ages, **options)
        results[name] = [tensors[0][indices], *tensors[1:]]
        if own is not None:
            assert torch.equal(results[name][0], own)
    for index, (ours, twin, again) in enumerate(zip(*results.values(), strict=True)):
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, twin, rtol=2e-6, atol=2e-5)
            continue
        assert (ours != twin).float().mean() < 0.005, index
        assert (ours != again).float().mean() > 0.1, index
        torch.testing.assert_close(
            ours.float(), twin.float(), rtol=2 ** (-7 if ours.dtype == torch.bfloat16 else -10), atol=1e-6
        )


def test_small_updates_survive_in_the_mean(run) -> None:
    """Updates of a 30th of a bfloat16 spacing: rounding to nearest loses all of them."""
    for implementation in ("triton", "torch"):
        ends = []
        for stochastic in (True, False):
            weight = torch.ones(4, 64, device=DEVICE).bfloat16()
            m, v = torch.zeros(2, 64, device=DEVICE), torch.zeros(2, 64, device=DEVICE)
            indices, grad = torch.tensor([1, 3], device=DEVICE), torch.ones(2, 64, device=DEVICE).bfloat16()
            for step in range(1, 41):
                key = make_key(0, 0, step) if stochastic else None
                run(
                    implementation,
                    alone(compact_adamw_),
                    weight,
                    indices,
                    grad,
                    m,
                    v,
                    step,
                    step_size=2**-7 / 60,
                    key=key,
                )
            ends.append(weight[indices].float().mean().item())
        assert abs(ends[0] - (1 - 40 * 2**-7 / 60)) < 2e-3
        assert ends[1] == 1.0


def test_offsets_past_int32(run) -> None:
    weight, grad = far_apart(3, 17, torch.float32), torch.randn(2, 17, device=DEVICE)
    weight.copy_(torch.randn(3, 17))
    indices = torch.tensor([0, 2], device=DEVICE)
    expected = weight.clone()
    for implementation, w in (("torch", expected), ("triton", weight)):
        m, v = torch.zeros(2, 17, device=DEVICE), torch.zeros(2, 17, device=DEVICE)
        run(implementation, alone(compact_adamw_), w, indices, grad, m, v, 3, step_size=0.1)
    torch.testing.assert_close(weight.clone(), expected)


@jit
def _corrections(out, steps, log_beta, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, _correction(tl.load(steps + i), log_beta))


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999])
def test_bias_correction_keeps_its_digits(beta) -> None:
    steps = torch.cat([torch.arange(1, 1001), torch.logspace(3, 7, 24).round()]).to(DEVICE)
    out = torch.empty(1024, device=DEVICE)
    log_beta = float(torch.tensor(beta, dtype=torch.float64).log())
    _corrections[(1,)](out, steps, log_beta, 1024)
    exact = -torch.expm1(steps.double() * log_beta)
    torch.testing.assert_close(out.double(), exact, rtol=6e-7, atol=0)
