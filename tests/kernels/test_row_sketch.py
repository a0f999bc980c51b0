"""``row_sketch``."""

import pytest
import torch

from grass.kernels import make_key, random_signs, row_sketch

from .conftest import DEVICE, DTYPES, LAYOUTS, far_apart, laid_out

# relative to the norm of the sketch: the projected operand is rounded to half precision, float32 for float16
NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-6}


@pytest.mark.parametrize("given", [False, True], ids=["own-signs", "given-signs"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (37, 23, 131, 8), (90, 67, 29, 33)], ids=str)
def test_equals_sketch_of_the_full_gradient(shape, dtype, layout, given, run) -> None:
    t, k, n, size = shape
    kept, mixed = (laid_out(torch.randn(t, width).to(dtype), layout) for width in (k, n))
    signs = random_signs(n, size, 5, DEVICE)
    chosen = {"signs": signs.to(dtype)} if given else {"size": size, "key": 5}
    exact = signs.to(dtype).double() if given else signs.double()
    expected = kept.double().t() @ mixed.double() @ exact
    for implementation in ("triton", "torch"):
        ours = run(implementation, row_sketch, kept, mixed, **chosen)
        assert ours.dtype == torch.float32
        assert (ours.double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm().clamp(min=1)


def test_offsets_past_int32(run) -> None:
    kept, mixed = far_apart(3, 17, torch.float32), far_apart(3, 19, torch.float32)
    for operand in (kept, mixed):
        operand.copy_(torch.randn(operand.shape))
    expected = kept.clone().t() @ mixed.clone() @ random_signs(19, 4, 5, DEVICE)
    torch.testing.assert_close(run("triton", row_sketch, kept, mixed, size=4, key=5), expected, rtol=1e-5, atol=1e-5)


def test_norms_of_the_gradient_in_the_mean() -> None:
    g, x = torch.randn(50, 6), torch.randn(50, 40)
    squares = torch.stack([row_sketch(g, x, size=32, key=make_key(k)).square().sum(1) for k in range(200)]).mean(0)
    torch.testing.assert_close(squares, (g.t() @ x).square().sum(1), rtol=0.06, atol=0)  # 4 sigma: sqrt(2/32/200)


def test_signs_are_fair_and_their_own() -> None:
    signs = random_signs(4096, 32, 1)
    assert signs.abs().eq(32**-0.5).all()
    signs = signs.sign()
    assert signs.mean().abs() < 4 / signs.numel() ** 0.5
    products = signs.t() @ signs - 4096 * torch.eye(32)
    assert products.abs().max() < 5 * 4096**0.5
    assert not torch.equal(signs, random_signs(4096, 32, 2).sign())
