"""``move_rows_``: the kernel and its twin against float64, in every combination of types, layouts and flags."""

import itertools

import pytest
import torch

from grass.kernels import make_key, move_rows_

from .conftest import DEVICE, DTYPES, LAYOUTS, TOLERANCE, alone, far_apart, laid_out


def problem(shape, q, dim, dtype, layout="rows", row_dtype=None):
    """Weight, indices, full gradient, factors, length, rows."""
    weight = laid_out(torch.randn(shape).to(dtype), layout)
    indices = torch.randperm(shape[dim])[:q].sort().values.to(DEVICE)
    grad = laid_out(torch.randn(shape).to(dtype), layout)
    factors, length = torch.rand(shape[1 - dim], device=DEVICE) + 0.5, torch.tensor(3.0, device=DEVICE)
    rows = None if row_dtype is None else laid_out(weight.index_select(dim, indices).to(row_dtype).cpu(), layout)
    return weight, indices, grad, factors, length, rows


def in_float64(weight, indices, grad, factors, length, rows, dim, step_size):
    """The formulas of the docstring, on float64 copies; returns the rows."""
    unit = grad.double().index_select(dim, indices) * factors.double().unsqueeze(dim)
    norms = unit.norm(dim=1 - dim, keepdim=True)
    old = weight.index_select(dim, indices) if rows is None else rows
    return old.double() - torch.where(norms > 0, step_size * length.double() / norms, 0.0) * unit


def moved(run, implementation, weight, indices, grad, factors, length, rows, dim=0, gather=True, **options):
    """The weight and the rows after a move of copies."""
    w, own = weight.clone(), None if rows is None else rows.clone()
    g = grad if gather else grad.index_select(dim, indices)
    options = {"step_size": 0.7, "dim": dim, "rows": own, "gather_grad": gather, **options}
    run(implementation, alone(move_rows_), w, indices, g, factors, length, **options)
    return w, own


CASES = [
    *itertools.product([(1, 1), (7, 13), (37, 131), (5, 29)], [torch.float32], ["rows"], [None, torch.float32]),
    *itertools.product([(19, 41)], DTYPES, LAYOUTS, [None, torch.float32]),
    *itertools.product([(3, 2100), (2100, 3)], [torch.bfloat16], ["rows", "columns"], [None, torch.bfloat16]),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shape", "dtype", "layout", "row_dtype"), CASES, ids=str)
def test_equals_float64(shape, dtype, layout, row_dtype, dim, run) -> None:
    q = {5: 1, 29: 29}.get(shape[dim], shape[dim] if shape[dim] < 8 else shape[dim] // 3)
    tensors = problem(shape, q, dim, dtype, layout, row_dtype)
    weight, indices, rows = tensors[0], tensors[1], tensors[-1]
    expected = in_float64(*tensors, dim, 0.7)
    rest = torch.ones(shape[dim], dtype=torch.bool, device=DEVICE).index_fill(0, indices, False)
    for implementation in ("triton", "torch"):
        w, own = moved(run, implementation, *tensors, dim, gather=rows is None)
        values = w.index_select(dim, indices) if own is None else own
        rtol, atol = TOLERANCE[values.dtype]
        torch.testing.assert_close(values, expected.to(values.dtype), rtol=rtol, atol=atol)
        if own is not None:
            assert torch.equal(w.index_select(dim, indices), own.to(dtype))
        assert torch.equal(w.transpose(0, dim)[rest], weight.transpose(0, dim)[rest])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("q", [9, 21])
def test_a_move_is_as_long_as_told(q, dim, run) -> None:
    tensors = problem((29, 31), q, dim, torch.float32)
    rest = torch.ones(tensors[0].shape[dim], dtype=torch.bool, device=DEVICE).index_fill(0, tensors[1], False)
    for implementation, sign in itertools.product(("triton", "torch"), (1, -1)):
        w, _ = moved(run, implementation, *tensors, dim, step_size=0.5 * sign)
        difference = (w - tensors[0]).index_select(dim, tensors[1])
        along = (difference * tensors[2].index_select(dim, tensors[1])).sum(1 - dim)
        torch.testing.assert_close(difference.norm(dim=1 - dim), torch.full((q,), 1.5, device=DEVICE))
        assert (along * sign < 0).all()
        assert torch.equal(w.transpose(0, dim)[rest], tensors[0].transpose(0, dim)[rest])


def test_rows_without_gradient_stay(run) -> None:
    tensors = problem((9, 21), 9, 0, torch.bfloat16)
    tensors[2][4] = 0
    for implementation in ("triton", "torch"):
        w, _ = moved(run, implementation, *tensors, key=make_key(3))
        assert torch.equal(w[4], tensors[0][4])
        assert w.isfinite().all()


@pytest.mark.parametrize("q", [7, 20])
@pytest.mark.parametrize("dim", [0, 1])
def test_norms_of_whole_rows_are_taken_from_outside(dim, q, run) -> None:
    """Two halves of the width move as the whole, given norms of the whole."""
    weight, indices, grad, factors, length, _ = tensors = problem((24, 24), q, dim, torch.float32)
    unit = grad.index_select(dim, indices) * factors.unsqueeze(dim)
    halves = [torch.arange(12, device=DEVICE), torch.arange(12, 24, device=DEVICE)]
    for implementation in ("triton", "torch"):
        whole, _ = moved(run, implementation, *tensors, dim)
        parts = []
        for half in halves:
            part = [t.index_select(1 - dim, half) for t in (weight, grad)]
            arguments = part[0], indices, part[1], factors[half], length, None
            parts.append(moved(run, implementation, *arguments, dim, norms=unit.norm(dim=1 - dim))[0])
        torch.testing.assert_close(torch.cat(parts, 1 - dim), whole)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("q", "dim"), [(11, 0), (11, 1), (30, 0)])
@pytest.mark.parametrize("row_dtype", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_draws_as_the_twin_does(dtype, row_dtype, q, dim, layout, run) -> None:
    """Both may differ by float32's last bit before rounding, so a few elements fall on the other side."""
    tensors = problem((37, 41), q, dim, dtype, layout, dtype if row_dtype == "same" else row_dtype)
    results = []
    for implementation, key in (("triton", 5), ("torch", 5), ("triton", 6)):
        w, own = moved(run, implementation, *tensors, dim, gather=tensors[-1] is None, key=make_key(key))
        results.append(w.index_select(dim, tensors[1]))
        if row_dtype == "same":
            assert torch.equal(results[-1], own)
    ours, twin, again = results
    assert (ours != twin).float().mean() < 0.005
    assert (ours != again).float().mean() > 0.1
    torch.testing.assert_close(
        ours.float(), twin.float(), rtol=2 ** (-7 if dtype == torch.bfloat16 else -10), atol=1e-6
    )


@pytest.mark.parametrize("rows", [None, torch.float32], ids=str)
def test_small_moves_survive_in_the_mean(rows, run) -> None:
    """Moves of a 60th of a bfloat16 spacing: rounding to nearest loses all of them."""
    for implementation in ("triton", "torch"):
        ends = []
        for stochastic in (True, False):
            weight = torch.ones(4, 64, device=DEVICE).bfloat16()
            indices, grad = torch.tensor([1, 3], device=DEVICE), torch.ones(2, 64, device=DEVICE).bfloat16()
            factors, length = torch.ones(64, device=DEVICE), torch.tensor(8.0, device=DEVICE)
            for step in range(1, 41):
                own = None if rows is None else weight[indices].to(rows)
                options = {"rows": own, "key": make_key(0, 0, step) if stochastic else None}
                run(
                    implementation,
                    alone(move_rows_),
                    weight,
                    indices,
                    grad,
                    factors,
                    length,
                    step_size=2**-7 / 60,
                    **options,
                )
            ends.append(weight[indices].float().mean().item())
        assert abs(ends[0] - (1 - 40 * 2**-7 / 60)) < 2e-3
        assert ends[1] == 1.0


def test_offsets_past_int32(run) -> None:
    weight = far_apart(3, 17, torch.float32)
    weight.copy_(torch.randn(3, 17))
    indices, grad = torch.tensor([0, 2], device=DEVICE), torch.randn(2, 17, device=DEVICE)
    factors, length = torch.ones(17, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    expected = weight.clone()
    for implementation, w in (("torch", expected), ("triton", weight)):
        run(implementation, alone(move_rows_), w, indices, grad, factors, length, step_size=0.1)
    torch.testing.assert_close(weight.clone(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 3}, "Invalid dim=3"),
        ({"grads": torch.ones(4, 6)}, r"grad has shape \(4, 6\), must be \(2, 6\)"),
        ({"grads": torch.ones(2, 6), "gather_grad": True}, r"grad has shape \(2, 6\), must be \(4, 6\)"),
        ({"factors": torch.ones(4)}, r"factors has shape \(4,\), must be \(6,\)"),
        ({"lengths": torch.ones(2)}, r"length has shape \(2,\), must be \(\)"),
        ({"rows": torch.ones(2, 5)}, r"rows has shape \(2, 5\), must be \(2, 6\)"),
        ({"norms": torch.ones(6)}, r"norms has shape \(6,\), must be \(2,\)"),
        ({"dim": 1, "factors": torch.ones(4)}, r"grad has shape \(2, 6\), must be \(4, 2\)"),
    ],
    ids=str,
)
def test_refused(change, message) -> None:
    arguments = {"weights": torch.ones(4, 6), "indices": torch.tensor([0, 3]), "grads": torch.ones(2, 6)}
    arguments |= {"factors": torch.ones(6), "lengths": torch.tensor(1.0), "step_size": 0.1}
    with pytest.raises(ValueError, match=message):
        alone(move_rows_)(**{**arguments, **change})
