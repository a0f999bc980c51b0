"""The compact gradient is the dense gradient's rows or columns; the full one is never formed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import grass
from tests.compact_mode.networks import DIMS, compact_layers

# Both sides sum the same products, so they differ by the order of sums alone: a few units of the last place of fp32.
# In half precision the result is rounded once more, to 2^-8 (bf16) or 2^-11 (fp16); twice that is allowed.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-13}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of ``dtype``, relative to the largest element."""
    assert actual.shape == expected.shape
    largest = expected.double().abs().max() if expected.numel() else torch.zeros(())
    difference = (actual.double() - expected.double()).abs()
    assert (difference <= TOLERANCES[dtype] * largest + 1e-12).all(), f"{difference.max()} of {largest}"


def conv1d(n: int, m: int, bias: bool) -> nn.Module:
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(m, n)


def linear(n: int, m: int, bias: bool) -> nn.Module:
    return nn.Linear(n, m, bias=bias)


def both_gradients(plain: nn.Module, dim: int, rank: int, x: Tensor, by_parts: int = 1) -> None:
    """Compare output and all gradients of a layer with those of its converted copy."""
    layer, dtype = copy.deepcopy(plain), x.dtype
    grass.compact(layer, rank=rank, explore=0, dim=dim)
    ours, theirs = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
    y, expected = layer(ours), plain(theirs)
    assert_close(y, expected, dtype)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    transposed = not isinstance(plain, nn.Linear)
    full = plain.weight.grad.t() if transposed else plain.weight.grad
    assert layer.active.grad.dtype == dtype
    assert_close(layer.active.grad, full.index_select(dim, layer.selected), dtype)
    assert layer.weight.grad is None
    if plain.bias is not None:
        assert_close(layer.bias.grad, plain.bias.grad, dtype)
    if x.requires_grad:
        assert_close(ours.grad, theirs.grad, dtype)


@given(
    m=st.integers(1, 33),
    n=st.integers(1, 33),
    fraction=st.floats(0.01, 1),
    leading=st.lists(st.integers(1, 5), max_size=3),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    input_grad=st.booleans(),
    make=st.sampled_from([linear, conv1d]),
)
def test_equals_the_dense_gradient(
    m: int,
    n: int,
    fraction: float,
    leading: list[int],
    dim: int,
    dtype: torch.dtype,
    bias: bool,
    input_grad: bool,
    make: Callable[[int, int, bool], nn.Module],
) -> None:
    """Inputs of any rank, down to one vector."""
    torch.manual_seed(m * n)
    rank = max(1, int(fraction * (m, n)[dim]))
    x = torch.randn(*leading, n, dtype=dtype, requires_grad=input_grad)
    both_gradients(make(n, m, bias).to(dtype), dim, rank, x)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("default", DTYPES, ids=str)
@pytest.mark.parametrize("active", [torch.float32, torch.bfloat16], ids=str)
def test_explored_rows_are_scaled(dim: int, default: torch.dtype, active: torch.dtype) -> None:
    """In the type of the active rows whatever torch's default is; to the bit those of the product, cast and scaled."""
    layer = nn.Linear(48, 40, bias=False, dtype=torch.bfloat16)
    grass.compact(layer, rank=5 + DTYPES.index(default), explore=11, dim=dim, dtype=active)  # factors are kept by shape
    x, grad = torch.randn(7, 48).bfloat16(), torch.randn(7, 40).bfloat16()
    torch.set_default_dtype(default)
    try:
        layer(x).backward(grad)
    finally:
        torch.set_default_dtype(torch.float32)
    rows = (grad[:, layer.chosen].t() @ x if dim == 0 else grad.t() @ x[:, layer.chosen]).to(active)
    layer.explored_part(rows).mul_(layer.gradient_scale)
    assert layer.gradient_scale != 1
    assert layer.active.grad.dtype == active
    assert torch.equal(layer.active.grad, rows)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (0, 3, 6)], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_no_rows_at_all(shape: tuple[int, ...], dim: int) -> None:
    """An expert that receives no token."""
    both_gradients(nn.Linear(6, 5), dim, 2, torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize("dim", DIMS)
def test_layouts(dim: int) -> None:
    """Strided inputs, and an output gradient that is one number expanded."""
    both_gradients(nn.Linear(6, 5), dim, 2, torch.randn(6, 4, 3).permute(1, 2, 0).requires_grad_())
    plain = nn.Linear(6, 5)
    layer = copy.deepcopy(plain)
    grass.compact(layer, rank=2, explore=0, dim=dim)
    x = torch.randn(3, 6)
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert_close(layer.active.grad, plain.weight.grad.index_select(dim, layer.selected), torch.float32)


@pytest.mark.parametrize("dim", DIMS)
def test_fine_rows_get_fine_gradients(dim: int) -> None:
    """fp32 rows over a bf16 weight: the gradient of each backward is bf16, their sum is not."""
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    grass.compact(layer, rank=2, explore=0, dim=dim, dtype=torch.float32)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    for scale in (1.0, 2**-10):  # in bf16 their sum would be 1
        (layer(x) * scale).sum().backward()
    assert layer.active.grad.dtype == torch.float32
    assert torch.equal(layer.active.grad, torch.full_like(layer.active, 1 + 2**-10))


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that backward keeps beside what lives anyway: parameters and buffers."""
    living = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        if tensor.untyped_storage().data_ptr() not in living:
            total += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return total


def test_columns_save_only_the_selected_inputs() -> None:
    b, n, r = 32, 24, 3
    for dim, expected in {0: b * n * 4, 1: b * r * 4}.items():
        layer = nn.Linear(n, 40)
        grass.compact(layer, rank=r, explore=0, dim=dim)
        x = torch.randn(b, n, requires_grad=True)
        assert saved_bytes(layer, x) == expected
        with torch.no_grad():
            assert saved_bytes(layer, x) == 0


@pytest.mark.parametrize("maker", [torch.relu, torch.tanh, torch.sigmoid, lambda x: torch.relu(x).view(4, 8, 24)])
def test_an_input_that_its_maker_keeps_is_saved_once(maker: Callable[[Tensor], Tensor]) -> None:
    """It takes no memory then, and the gradient is that of saved columns, bit for bit."""
    layer = nn.Linear(24, 40)
    grass.compact(layer, rank=3)
    gradients = []
    for keeps in (True, False):
        start = torch.randn(32, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
        x = maker(start) if keeps else maker(start) * 1.0  # a product does not keep its result
        living = x.untyped_storage().data_ptr()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):  # noqa: B023
            y = layer(x)
        assert any(t.untyped_storage().data_ptr() == living for t in saved) == keeps
        assert any(t.shape[-1] == 6 and t.is_floating_point() for t in saved) != keeps
        y.square().sum().backward()
        gradients.append((layer.active.grad, start.grad))
        layer.active.grad = None
    for kept, picked in zip(*gradients, strict=True):
        assert torch.equal(kept, picked)


def test_without_gradients_nothing_is_gathered() -> None:
    """Evaluation costs what the plain layer costs."""
    with torch.profiler.profile() as plain:
        nn.Linear(24, 40)(x := torch.randn(8, 24))
    layer = nn.Linear(24, 40)
    grass.compact(layer, rank=3, explore=0)
    with torch.no_grad(), torch.profiler.profile() as ours:
        layer(x)
    assert {e.key for e in ours.key_averages()} <= {e.key for e in plain.key_averages()}


def test_no_tensor_of_the_full_gradients_size_is_made() -> None:
    """Every operation of backward is looked at: what has ``m n`` elements is the weight and nothing else."""
    from torch.utils._python_dispatch import TorchDispatchMode

    b, m, n = 4, 30, 50

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                self.numel = max(self.numel, out.numel())
            return out

    for dim, rank in [(0, 3), (1, 3)]:
        layer = nn.Linear(n, m)
        grass.compact(layer, rank=rank, explore=0, dim=dim)
        y = layer(torch.randn(b, n, requires_grad=True))
        with Largest() as largest:
            y.sum().backward()
        assert 0 < largest.numel <= max(rank * (n, m)[dim], b * n, b * m)
    plain = nn.Linear(n, m)
    y = plain(torch.randn(b, n))
    with Largest() as largest:
        y.sum().backward()
    assert largest.numel == m * n, "the measurement sees the dense gradient"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.add_(1)], ids=["activation", "sum"])
@pytest.mark.parametrize("explore", [0, 1])
def test_output_changed_in_place(explore: int, change: Callable, shape: tuple[int, ...], bias: bool) -> None:
    """As by ``ReLU(inplace=True)`` and ``y += residual``."""
    layer = nn.Linear(5, 4, bias=bias, dtype=torch.float64)
    dense = copy.deepcopy(layer)
    grass.compact(layer, rank=2, explore=explore)
    x = torch.randn(shape, dtype=torch.float64)
    for m in (layer, dense):
        change(m(x)).square().sum().backward()
    expected = dense.weight.grad.index_select(1, layer.chosen)
    layer.explored_part(expected).mul_(layer.gradient_scale)
    torch.testing.assert_close(layer.active.grad, expected)


@pytest.mark.parametrize("dim", DIMS)
def test_in_a_whole_llama(tiny_llama, token_batches, dim: int) -> None:
    """Every converted layer and every plain parameter of a model, against the same model unconverted."""
    model, dense = tiny_llama(), tiny_llama()
    names = grass.compact(model, rank=0.25, explore=0, dim=dim)
    for m in (model, dense):
        m(input_ids=token_batches[0], labels=token_batches[0]).loss.backward()
    layers, expected = compact_layers(model), dict(dense.named_parameters())
    assert list(layers) == names
    for name, layer in layers.items():
        rows = expected[f"{name}.weight"].grad.index_select(dim, layer.selected)
        assert_close(layer.active.grad, rows, torch.float32)
    plain = {name: p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("active")}
    assert len(plain) + len(layers) == len(expected)
    for name, p in plain.items():
        assert_close(p.grad, expected[name].grad, torch.float32)
