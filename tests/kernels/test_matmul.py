"""The product behind compact gradients against float64."""

from __future__ import annotations

import pytest
import torch

from grass.compact_mode import products as matmul
from grass.compact_mode.products import inner_product

# rtol: a float32 sum of t products loses up to t * 2^-24 of the sum of their magnitudes; bf16 and fp16 round the result
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
SHAPES = {"empty": (0, 3, 5), "one": (1, 1, 1), "small": (7, 3, 5), "large": (301, 127, 131)}


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES, ids=[str(dtype) for dtype, _ in TOLERANCES])
def test_inner_product(dtype: torch.dtype, rtol: float, shape: tuple[int, int, int], strided: bool) -> None:
    tokens, rows, columns = shape
    a, b = torch.randn(tokens, rows), torch.randn(tokens, columns)
    a, b = a.to(dtype), b.to(dtype)
    exact, magnitude = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    if strided:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    product = inner_product(a, b)
    assert product.dtype == dtype
    assert product.shape == (rows, columns)
    assert ((product.double() - exact).abs() <= rtol * magnitude + 1e-30).all()


@pytest.mark.skipif(not has_onednn(), reason="torch without oneDNN")
def test_onednn_where_it_pays() -> None:
    """Large float32 products on a CPU, and only where oneDNN is enabled."""
    large, small = torch.empty(301, 127), torch.empty(7, 3)
    assert not matmul._onednn_pays(large, large), "autograd may have to differentiate it again"
    with torch.no_grad():
        assert matmul._onednn_pays(large, large)
        assert not matmul._onednn_pays(small, small)
        assert not matmul._onednn_pays(large.double(), large.double())
        assert not matmul._onednn_pays(large.to("meta"), large.to("meta"))
        with torch.backends.mkldnn.flags(enabled=False):
            assert not matmul._onednn_pays(large, large)
