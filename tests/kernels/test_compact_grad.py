"""``compact_grad``."""

import pytest
import torch

from grass.kernels import compact_grad

from .conftest import DEVICE, DTYPES, LAYOUTS, far_apart, laid_out

# relative to the norm of the whole product: float32 sums in another order; one rounding of each element
NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (17, 23, 29, 5), (131, 37, 41, 37), (300, 19, 150, 18)], ids=str)
def test_equals_rows_of_the_full_gradient(shape, dtype, layout, run) -> None:
    b, m, n, r = shape
    g, x = (laid_out(torch.randn(b, size).to(dtype), layout) for size in (m, n))
    indices = torch.randint(m, (r,), device=DEVICE)
    expected = (g.double().t() @ x.double())[indices]
    for implementation in ("triton", "torch"):
        ours = run(implementation, compact_grad, g, x, indices)
        assert ours.dtype == dtype
        assert (ours.double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm()


def test_no_tokens(run) -> None:
    g, x = torch.empty(0, 5, device=DEVICE), torch.empty(0, 7, device=DEVICE)
    assert torch.equal(run("triton", compact_grad, g, x, torch.tensor([1, 4], device=DEVICE)).cpu(), torch.zeros(2, 7))


def test_offsets_past_int32(run) -> None:
    a = far_apart(3, 17, torch.bfloat16)
    a.copy_(torch.randn(3, 17))
    b = torch.randn(3, 19, device=DEVICE).bfloat16()
    indices = torch.tensor([16, 2], device=DEVICE)
    ours, expected = run("triton", compact_grad, a, b, indices), a.float()[:, indices].t() @ b.float()
    torch.testing.assert_close(ours, expected.bfloat16(), rtol=8e-3, atol=1e-5)
