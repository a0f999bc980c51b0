"""``row_norms``."""

import pytest
import torch

from grass.kernels import row_norms

from .conftest import DEVICE, DTYPES, LAYOUTS, assert_close, far_apart, laid_out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (131, 37), (3, 9001), (9001, 3)], ids=str)
def test_equals_float64(shape, dtype, dim, layout, run) -> None:
    x = laid_out(torch.randn(shape).to(dtype), layout)
    expected = x.double().square().sum(1 - dim).sqrt().float()
    for implementation, rtol in (("triton", 1e-6), ("torch", 6e-6)):  # torch's strided sums lose half a digit
        torch.testing.assert_close(run(implementation, row_norms, x, dim), expected, rtol=rtol, atol=0)


def test_half_precision_squares_do_not_overflow(run) -> None:
    x = torch.full((3, 100), 6e4, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(run("triton", row_norms, x), torch.full((3,), 6e5, device=DEVICE), rtol=1e-3, atol=0)


def test_offsets_past_int32(run) -> None:
    x = far_apart(3, 17, torch.bfloat16)
    x.copy_(torch.randn(3, 17))
    for dim in (0, 1):
        assert_close(run("triton", row_norms, x, dim), x.float().square().sum(1 - dim).sqrt())


def test_wrong_dim() -> None:
    with pytest.raises(ValueError, match="dim=2"):
        row_norms(torch.zeros(2, 2), 2)
