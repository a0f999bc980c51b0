"""``reload_rows_``: the kernel and its twin against indexing. Several weights at once: ``test_together.py``."""

from __future__ import annotations

import pytest
import torch

from grass.kernels import reload_rows_

from .conftest import DEVICE, LAYOUTS, far_apart, laid_out


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(40, 30), (30, 2100), (2100, 30)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_indexing(dtypes, layout, shape, dim, run) -> None:
    weight = laid_out(torch.randn(shape).to(dtypes[0]), layout)
    indices = torch.tensor([3, 29, 3], device=DEVICE)
    expected = weight.index_select(dim, indices).to(dtypes[1])
    for implementation in ("triton", "torch"):
        rows = torch.empty_like(expected)
        run(implementation, reload_rows_, [rows], [weight], [indices], dim=dim)
        assert torch.equal(rows, expected)


def test_offsets_past_int32(run) -> None:
    weight = far_apart(3, 17, torch.bfloat16)
    weight.copy_(torch.randn(3, 17))
    rows, indices = torch.empty(2, 17, device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    run("triton", reload_rows_, [rows], [weight], [indices])
    assert torch.equal(rows, weight[indices].float())
