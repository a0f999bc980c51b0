"""``gather_rows`` and ``gather_cols``."""

import pytest
import torch

from grass.kernels import gather_cols, gather_rows

from .conftest import DEVICE, DTYPES, LAYOUTS, far_apart, laid_out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "r"), [((1, 1), 1), ((19, 23), 1), ((7, 13), 7), ((37, 131), 5), ((67, 1031), 11)], ids=str
)
@pytest.mark.parametrize("gather", [gather_rows, gather_cols])
def test_equals_twin(gather, shape, r, dtype, layout, run) -> None:
    x = laid_out(torch.randn(shape).to(dtype), layout)
    indices = torch.randint(shape[gather is gather_cols], (r,), device=DEVICE)
    expected = x[indices] if gather is gather_rows else x[:, indices]
    for implementation in ("triton", "torch"):
        ours = run(implementation, gather, x, indices)
        assert torch.equal(ours, expected)
        assert ours.dtype == dtype
        assert (ours.stride(0) == 1) == (layout == "columns") or 1 in ours.shape


def test_offsets_past_int32(run) -> None:
    x = far_apart(3, 17, torch.bfloat16)
    x.copy_(torch.randn(3, 17))
    indices = torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(run("triton", gather_rows, x, indices), x[indices])
    assert torch.equal(run("triton", gather_cols, x.t(), indices), x.t()[:, indices])
