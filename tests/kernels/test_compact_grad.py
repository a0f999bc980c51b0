"""``compact_grad``: the kernel, and the gather before a matrix product."""

import sys

import pytest
import torch

from grass.kernels import compact_grad
from grass.kernels.compact_grad import transposed_product

from .conftest import DEVICE, DTYPES, LAYOUTS, far_apart, laid_out

# relative to the norm of the whole product: float32 sums in another order; one rounding of each element
NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (17, 23, 29, 5), (131, 37, 41, 37), (300, 19, 150, 18)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_equals_rows_of_the_full_gradient(dim, shape, dtype, layout, run) -> None:
    b, m, n, r = shape
    g, x = (laid_out(torch.randn(b, size).to(dtype), layout) for size in (m, n))
    indices = torch.randint((m, n)[dim], (min(r, (m, n)[dim]),), device=DEVICE)
    expected = (g.double().t() @ x.double()).index_select(dim, indices)
    for implementation in ("triton", "torch"):
        ours = run(implementation, compact_grad, g, x, indices, dim)
        assert ours.dtype == dtype
        assert (ours.double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_split_over_programs(dtype, splits) -> None:
    a, b = torch.randn(157, 31).to(DEVICE, dtype), torch.randn(157, 43).to(DEVICE, dtype)
    indices = torch.tensor([30, 0, 7, 7], device=DEVICE)
    expected = (a.double().t() @ b.double())[indices]
    results = [transposed_product(a, b, indices, dtype, splits) for _ in range(2)]
    assert torch.equal(*results)
    assert (results[0].double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm()


def test_no_tokens(run) -> None:
    g, x = torch.empty(0, 5, device=DEVICE), torch.empty(0, 7, device=DEVICE)
    assert torch.equal(
        run("triton", compact_grad, g, x, torch.tensor([1, 4], device=DEVICE), 0).cpu(), torch.zeros(2, 7)
    )


def test_offsets_past_int32() -> None:
    a = far_apart(3, 17, torch.bfloat16)
    a.copy_(torch.randn(3, 17))
    b = torch.randn(3, 19, device=DEVICE).bfloat16()
    indices = torch.tensor([16, 2], device=DEVICE)
    ours, expected = transposed_product(a, b, indices, torch.float32), a.float()[:, indices].t() @ b.float()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_kernel_where_it_pays_and_gather_elsewhere(run, monkeypatch) -> None:
    module, taken = sys.modules["grass.kernels.compact_grad"], []
    for name in ("gather_cols", "transposed_product"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, n=name, f=original: taken.append(n) or f(*args))
    g, x = torch.randn(8, 600, device=DEVICE), torch.randn(8, 600, device=DEVICE)
    for r, inputs in ((4, x), (300, x), (300, x[:, :50])):
        indices = torch.arange(r, device=DEVICE)
        ours = run("triton", compact_grad, g, inputs, indices, 0)
        torch.testing.assert_close(ours, (g.t() @ inputs)[:r], rtol=1e-5, atol=1e-5)
    assert taken == ["transposed_product", "gather_cols", "transposed_product"]
