"""``row_sketch``."""

import pytest
import torch

from grass.kernels import row_sketch

from .conftest import DEVICE, DTYPES, LAYOUTS, far_apart, laid_out

# relative to the norm of the sketch: the projected operand is rounded to half precision, float32 for float16
NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-6}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (37, 23, 131, 8), (90, 67, 29, 33)], ids=str)
def test_equals_sketch_of_the_full_gradient(shape, dtype, layout, run) -> None:
    t, k, n, size = shape
    kept, mixed = (laid_out(torch.randn(t, width).to(dtype), layout) for width in (k, n))
    signs = random_signs(n, size).to(dtype)
    expected = kept.double().t() @ mixed.double() @ signs.double()
    for implementation in ("triton", "torch"):
        ours = run(implementation, row_sketch, kept, mixed, signs)
        assert ours.dtype == torch.float32
        assert (ours.double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm().clamp(min=1)


def test_offsets_past_int32(run) -> None:
    kept, mixed = far_apart(3, 17, torch.float32), far_apart(3, 19, torch.float32)
    for operand in (kept, mixed):
        operand.copy_(torch.randn(operand.shape))
    signs = random_signs(19, 4)
    expected = kept.clone().t() @ mixed.clone() @ signs
    torch.testing.assert_close(run("triton", row_sketch, kept, mixed, signs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 157, 600, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_split_over_programs(dtype, tokens, run) -> None:
    kept, mixed = torch.randn(tokens, 31).to(DEVICE, dtype), torch.randn(tokens, 43).to(DEVICE, dtype)
    signs = random_signs(43, 4).to(dtype)
    expected = kept.double().t() @ mixed.double() @ signs.double()
    results = [run("triton", row_sketch, kept, mixed, signs) for _ in range(2)]
    assert torch.equal(*results)
    assert (results[0].double() - expected).norm() <= NORM_TOLERANCE[dtype] * expected.norm()


def test_norms_of_the_gradient_in_the_mean() -> None:
    g, x = torch.randn(50, 6), torch.randn(50, 40)
    squares = torch.stack([row_sketch(g, x, random_signs(40, 32, "cpu")).square().sum(1) for _ in range(200)]).mean(0)
    torch.testing.assert_close(squares, (g.t() @ x).square().sum(1), rtol=0.06, atol=0)  # 4 sigma: sqrt(2/32/200)


def random_signs(length: int, size: int, device: str = DEVICE) -> torch.Tensor:
    """Independent signs over ``sqrt(size)``."""
    return ((2.0 * torch.randint(2, (length, size)) - 1.0) * size**-0.5).to(device)
