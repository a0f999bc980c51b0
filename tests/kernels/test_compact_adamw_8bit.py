"""``compact_adamw_8bit_``: the kernel and its twin against the step of the decoded moments."""

import itertools

import pytest
import torch

from grass.kernels import compact_adamw_, compact_adamw_8bit_, make_key, random_bits
from grass.kernels.moment_codes import BLOCK, decode_moment, dynamic_map, encode_moment

from .conftest import DEVICE, DTYPES, LAYOUTS, alone, far_apart, laid_out

HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "step_size": 1e-2, "shrink": 0.9}


def coded(moments, key=9):
    """Codes and scales of both moments."""
    place = torch.arange(moments[0].numel(), device=DEVICE)
    first = encode_moment(moments[0], True, random_bits(place, make_key(key), 1))
    return [*first, *encode_moment(moments[1].sqrt(), False, random_bits(place, make_key(key), 2))]


def decoded(first, first_scale, second, second_scale):
    return decode_moment(first, first_scale, True), decode_moment(second, second_scale, False).square()


def problem(shape, r, dim, dtype=torch.float32, layout="rows", row_dtype=None):
    weight, grad = (laid_out(torch.randn(shape).to(dtype), layout) for _ in range(2))
    indices = torch.randperm(shape[dim])[:r].sort().values.to(DEVICE)
    dense = layout if layout != "sliced" else "rows"
    spread = torch.logspace(-5, 1, r).unsqueeze(1 - dim)
    moments = [laid_out((f(shape).narrow(dim, 0, r) * spread), dense) for f in (torch.randn, torch.rand)]
    rows = None if row_dtype is None else weight.index_select(dim, indices).to(row_dtype)
    return weight, indices, grad, coded(moments), torch.randint(1, 2000, (r,)).float().to(DEVICE), rows


CASES = [
    *itertools.product([(1, 1), (7, 13), (37, 131), (5, 700)], [torch.float32], ["rows"], [None, torch.float32]),
    *itertools.product([(19, 41)], DTYPES, LAYOUTS, [None, torch.float32]),
    *itertools.product([(700, 3)], [torch.bfloat16], ["rows", "columns"], [None]),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shape", "dtype", "layout", "row_dtype"), CASES, ids=str)
def test_equals_the_step_of_decoded_moments(shape, dtype, layout, row_dtype, dim, run) -> None:
    """Weights to float32's last bits; moments to the code above or below, as the twin draws it but for those bits."""
    r = {5: 1, 41: 41}.get(shape[dim], shape[dim] if shape[dim] < 8 else shape[dim] // 3)
    weight, indices, grad, codes, ages, rows = problem(shape, r, dim, dtype, layout, row_dtype)
    full = rows is None
    g, steps = (grad, ages) if full else (grad.index_select(dim, indices), 17)
    results = {}
    for implementation in ("triton", "torch", "decoded"):
        w, c, own = weight.clone(), [t.clone() for t in codes], None if full else rows.clone()
        options = {"dim": dim, "rows": own, "gather_grad": full, "maximize": not full, "key": make_key(3), **HYPER}
        if implementation == "decoded":
            moments = decoded(*c)
            run("torch", alone(compact_adamw_), w, indices, g, *moments, steps, **options)
            results["codes"] = coded(moments, 5)
        else:
            run(implementation, alone(compact_adamw_8bit_), w, indices, g, *c, steps, moment_key=make_key(5), **options)
            results[f"{implementation} codes"] = c
        results[implementation] = [w] if full else [w, own]
    for implementation in ("triton", "torch"):
        for ours, exact in zip(results[implementation], results["decoded"], strict=True):
            tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[ours.dtype]
            torch.testing.assert_close(ours, exact, rtol=tolerance, atol=2e-6)
            assert ours.dtype == torch.float32 or (ours != exact).float().mean() < 0.01
        for i, (ours, exact) in enumerate(zip(results[f"{implementation} codes"], results["codes"], strict=True)):
            if i % 2:
                torch.testing.assert_close(ours, exact, rtol=1e-6, atol=0)
            else:
                assert ours.stride() == exact.stride()
                assert (ours.int() - exact.int()).abs().max() <= 1
                assert (ours != exact).float().mean() <= (0.01 if ours.numel() > 400 else 1 / ours.numel())


def test_another_key_draws_other_codes(run) -> None:
    weight, indices, grad, codes, _, _ = problem((37, 131), 11, 0)
    drawn = []
    for key in (1, 1, 2):
        c = [t.clone() for t in codes]
        keys = {"moment_key": make_key(key)}
        run("triton", alone(compact_adamw_8bit_), weight.clone(), indices, grad[indices], *c, 3, step_size=0.1, **keys)
        drawn.append(c)
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    for i in (0, 2):
        assert (drawn[0][i] != drawn[2][i]).float().mean() > 0.1


@pytest.mark.slow
def test_codes_are_right_in_the_mean(run) -> None:
    """A second moment that decays by a thousandth a step does so in the mean."""
    weight, indices = torch.zeros(4, 300, device=DEVICE), torch.arange(4, device=DEVICE)
    codes = coded([torch.zeros(4, 300, device=DEVICE), torch.rand(4, 300).to(DEVICE)])
    before, grad = decoded(*codes)[1].mean(), torch.zeros(4, 300, device=DEVICE)
    for step in range(1, 41):
        keys = {"moment_key": make_key(0, 0, step)}
        run("triton", alone(compact_adamw_8bit_), weight, indices, grad, *codes, step, step_size=0.0, **keys)
    assert abs((decoded(*codes)[1].mean() / before).item() / 0.999**40 - 1) < 5e-3


def test_zeros_and_broken_values(run) -> None:
    """Zero stays zero; a gradient that is no number makes that of its block, as in the twin, and of no other."""
    for implementation in ("triton", "torch"):
        weight, indices = torch.ones(2, 2 * BLOCK, device=DEVICE), torch.arange(2, device=DEVICE)
        codes = coded([torch.zeros(2, 2 * BLOCK, device=DEVICE) for _ in range(2)])
        grad = torch.zeros(2, 2 * BLOCK, device=DEVICE)
        grad[0, 0] = float("nan")
        run(implementation, alone(compact_adamw_8bit_), weight, indices, grad, *codes, 1, step_size=0.1, moment_key=7)
        for moment in decoded(*codes):
            assert moment[0, :BLOCK].isnan().all()
            assert not moment[0, BLOCK:].any()
            assert not moment[1].any()
        assert weight.isnan().sum() == 1


def test_offsets_past_int32(run) -> None:
    weight = far_apart(3, 17, torch.float32)
    weight.copy_(torch.randn(3, 17))
    grad, indices = torch.randn(2, 17, device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    expected = weight.clone()
    for implementation, w in (("torch", expected), ("triton", weight)):
        codes = coded([torch.zeros(2, 17, device=DEVICE) for _ in range(2)])
        run(implementation, alone(compact_adamw_8bit_), w, indices, grad, *codes, 3, step_size=0.1, moment_key=7)
    torch.testing.assert_close(weight.clone(), expected)


def test_the_tables_have_the_sizes_that_the_kernel_assumes() -> None:
    assert len(dynamic_map(True)) == 255
    assert dynamic_map(True)[127] == 0
    assert len(dynamic_map(False)) == 256
