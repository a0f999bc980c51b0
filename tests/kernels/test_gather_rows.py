"""``gather_rows`` and ``gather_cols``."""

import pytest
import torch

from grass.kernels import gather_cols, gather_rows

from .conftest import DEVICE, DTYPES, LAYOUTS, assert_close, far_apart, laid_out


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


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gather", [gather_rows, gather_cols])
def test_scales_casts_and_accumulates(gather, dtype, out_dtype, run) -> None:
    x, indices = torch.randn(19, 41).to(DEVICE, dtype), torch.tensor([3, 0, 3, 18], device=DEVICE)
    scale = torch.rand(4, device=DEVICE) + 0.5
    held = torch.randn((4, 41) if gather is gather_rows else (19, 4)).to(DEVICE, out_dtype)
    wide = x.double()[indices] * scale[:, None] if gather is gather_rows else x.double()[:, indices] * scale
    for implementation in ("triton", "torch"):
        ours = run(implementation, gather, x, indices, scale, dtype=out_dtype)
        assert_close(ours, wide.to(out_dtype))
        into = held.clone()
        assert run(implementation, gather, x, indices, scale, out=into, accumulate=True).data_ptr() == into.data_ptr()
        assert_close(into, (wide + held).to(out_dtype))


def test_offsets_past_int32(run) -> None:
    x = far_apart(3, 17, torch.bfloat16)
    x.copy_(torch.randn(3, 17))
    indices = torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(run("triton", gather_rows, x, indices), x[indices])
    assert torch.equal(run("triton", gather_cols, x.t(), indices), x.t()[:, indices])
    out = far_apart(3, 17, torch.bfloat16)
    assert torch.equal(run("triton", gather_rows, x, torch.arange(3, device=DEVICE), out=out), x)


def test_wrong_out() -> None:
    x, indices = torch.randn(4, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="needs out"):
        gather_rows(x, indices, accumulate=True)
    with pytest.raises(ValueError, match=r"must be \(2, 5\)"):
        gather_rows(x, indices, out=torch.empty(2, 4))
