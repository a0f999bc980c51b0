"""``scatter_add_rows`` and ``scatter_add_cols``."""

import pytest
import torch

from grass.kernels import scatter_add_cols, scatter_add_rows

from .conftest import DEVICE, DTYPES, LAYOUTS, assert_close, far_apart, laid_out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "r"), [((1, 1), 3), ((19, 23), 1), ((7, 13), 7), ((37, 131), 90), ((5, 1031), 11)], ids=str
)
@pytest.mark.parametrize("scatter", [scatter_add_rows, scatter_add_cols])
def test_duplicates_add_up(scatter, shape, r, dtype, layout, run) -> None:
    dim = int(scatter is scatter_add_cols)
    indices = torch.randint(shape[dim], (r,), device=DEVICE)
    x = torch.randn((r, shape[1]) if dim == 0 else (shape[0], r)).to(DEVICE, dtype)
    scale = torch.rand(r, device=DEVICE) + 0.5
    start = torch.randn(shape).to(dtype)
    along = scale[:, None] if dim == 0 else scale
    expected = start.double().to(DEVICE).index_add_(dim, indices, x.double() * along, alpha=-0.5).to(dtype)
    for implementation in ("triton", "torch"):
        out = laid_out(start, layout)
        assert run(implementation, scatter, out, indices, x, scale, alpha=-0.5).data_ptr() == out.data_ptr()
        assert_close(out, expected)


@pytest.mark.parametrize("scatter", [scatter_add_rows, scatter_add_cols])
def test_distinct_rows_without_scale(scatter, run) -> None:
    dim = int(scatter is scatter_add_cols)
    indices = torch.randperm(23)[:11].to(DEVICE)
    x = torch.randn((11, 23) if dim == 0 else (23, 11), device=DEVICE)
    for implementation in ("triton", "torch"):
        out = torch.ones(23, 23, device=DEVICE)
        run(implementation, scatter, out, indices, x)
        torch.testing.assert_close(out, torch.ones(23, 23, device=DEVICE).index_add_(dim, indices, x))


def test_deterministic(run) -> None:
    indices, x = torch.randint(3, (64,), device=DEVICE), torch.randn(64, 19, device=DEVICE) * 1e4
    results = [run("triton", scatter_add_rows, torch.zeros(3, 19, device=DEVICE), indices, x) for _ in range(2)]
    assert torch.equal(*results)
    by_hand = torch.stack([_sequential(x[indices == row]) for row in range(3)])
    assert torch.equal(results[0], by_hand)  # in the order in which they come


def test_offsets_past_int32(run) -> None:
    out, x = far_apart(3, 17, torch.bfloat16), torch.randn(4, 17, device=DEVICE).bfloat16()
    out.zero_()
    run("triton", scatter_add_rows, out, torch.tensor([2, 0, 2, 2], device=DEVICE), x)
    assert_close(out, torch.stack([x[1].float(), x[0] * 0.0, x[0].float() + x[2] + x[3]]).bfloat16())


def test_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"must be \(2, 5\)"):
        scatter_add_rows(torch.zeros(4, 5), torch.tensor([0, 1]), torch.zeros(3, 5))


def _sequential(rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
