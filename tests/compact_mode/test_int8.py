"""Frozen weights in 8 bits: quantisation, gradients, what a step touches, saving, loading and expanding."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import grass
from grass import GrassAdamW
from grass.compact_mode.int8 import Int8Storage, plain_state_dict
from grass.compact_mode.weight_codes import decode_weight, encode_weight
from tests.compact_mode.networks import (
    DIMS,
    Network,
    assert_same_weights,
    batches,
    compact_layers,
    loss_of,
    through_file,
    train,
)

OPTIONS = dict(explore=0, selection="multinomial_norm", state_policy="keep", update_interval=4, lr=1e-2)


def quantised(dtype: torch.dtype = torch.float32, dim: int = 1, **options: object) -> tuple[Network, GrassAdamW]:
    model = Network(dtype)
    grass.compact(model, rank=3, explore=0, dim=dim, weights="int8")
    return model, GrassAdamW(model, **{**OPTIONS, **options})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from(DIMS), st.floats(-6, 6), st.one_of(st.none(), st.integers(0))
)
def test_quantisation_error(m: int, n: int, dim: int, exponent: float, key: int | None) -> None:
    """Within half a step to nearest, within one step stochastically; zeros stay zeros."""
    matrix = torch.randn(m, n) * 10**exponent
    matrix.select(dim, 0).zero_()
    codes, scale = encode_weight(matrix, dim, key)
    steps = scale.unsqueeze(1 - dim).expand(m, n)
    bound = 0.5 if key is None else 1.0
    # a quotient of 127 float32 steps and a product are each off by 2^-24 of themselves
    error = (decode_weight(codes, scale, dim, torch.float32) - matrix).abs()
    assert (error <= steps * (bound + 127 * 2**-22)).all()
    assert not codes.select(dim, 0).any()


@pytest.mark.parametrize("dim", DIMS)
def test_stochastic_rounding_is_unbiased(dim: int) -> None:
    matrix, draws = torch.randn(6, 5), 4000
    mean = sum(decode_weight(*encode_weight(matrix, dim, key), dim, torch.float64) for key in range(draws)) / draws
    steps = encode_weight(matrix, dim)[1].unsqueeze(1 - dim).double()
    # a rounding varies by at most a quarter of a squared step: five standard errors
    assert ((mean - matrix).abs() / steps).max() < 5 * 0.5 / draws**0.5
    assert torch.equal(encode_weight(matrix, dim, 7)[0], encode_weight(matrix, dim, 7)[0])
    large = torch.randn(40, 40)
    assert not torch.equal(encode_weight(large, dim, 7)[0], encode_weight(large, dim, 8)[0])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients(dtype: torch.dtype, dim: int) -> None:
    """Those of a plain layer whose weight is what the codes stand for."""
    layer = nn.Linear(12, 20, dtype=dtype)
    grass.compact(layer_in := nn.Sequential(layer), rank=3, explore=0, dim=dim, weights="int8")
    values = decode_weight(layer.matrix(), layer.weight_scale, dim, dtype).requires_grad_(True)
    bias = layer.bias.detach().clone().requires_grad_(True)
    x, y = (torch.randn(2, 5, 12, dtype=dtype, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    g = torch.randn(2, 5, 20, dtype=dtype)
    ours, theirs = layer_in(x), F.linear(y, values, bias)
    assert torch.equal(ours, theirs)
    ours.backward(g)
    theirs.backward(g)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]  # sums of 10 products, in another order
    rows = layer.projector().gather(values.grad).to(torch.float32)
    torch.testing.assert_close(layer.active.grad, rows, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(layer.bias.grad, bias.grad, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(layer_in(x), ours)


@pytest.mark.parametrize("dim", DIMS)
def test_a_step_touches_the_active_rows_alone(dim: int) -> None:
    model, optimizer = quantised(dim=dim, update_interval=100)
    before = copy.deepcopy(model.state_dict())
    rows = {name: set(layer.selected.tolist()) for name, layer in compact_layers(model).items()}
    train(model, optimizer, batches(5))
    after = model.state_dict()
    for name, layer in compact_layers(model).items():
        codes = (after[f"{name}.weight_codes"] != before[f"{name}.weight_codes"]).any(1 - dim)
        scales = after[f"{name}.weight_scale"] != before[f"{name}.weight_scale"]
        assert set(codes.nonzero().flatten().tolist()) == rows[name]
        assert set(scales.nonzero().flatten().tolist()) <= rows[name]
        assert layer.holds_active()


@pytest.mark.parametrize("dim", DIMS)
def test_trains_like_full_precision(dim: int) -> None:
    """The loss follows that of unquantised weights with the same selections."""
    ours, optimizer = quantised(dim=dim, update_interval=1000)
    theirs = Network()
    grass.compact(theirs, rank=3, explore=0, dim=dim)
    reference = GrassAdamW(theirs, **{**OPTIONS, "update_interval": 1000})
    data = batches(1) * 60
    losses, expected = train(ours, optimizer, data), train(theirs, reference, data)
    assert losses[-1] < 0.7 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.03, atol=0)  # codes of 8 bits


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_resume_is_exact(dim: int, policy: str) -> None:
    data = batches(11)
    whole, optimizer = quantised(dim=dim, state_policy=policy)
    train(whole, optimizer, data)
    first, optimizer = quantised(dim=dim, state_policy=policy)
    train(first, optimizer, data[:6])
    model_state, optimizer_state = through_file((first.state_dict(), optimizer.state_dict()))
    second, optimizer = quantised(dim=dim, state_policy=policy)
    second.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    train(second, optimizer, data[6:])
    assert_same_weights(second, whole)


def test_loads_a_plain_model() -> None:
    """Its weights are quantised as at conversion, and the active rows taken from it."""
    plain = Network(seed=3)
    model, _ = quantised()
    model.load_state_dict(plain.state_dict())
    fresh = Network(seed=3)
    grass.compact(fresh, rank=3, explore=0, weights="int8")
    assert_same_weights(model, fresh)


@pytest.mark.parametrize("dim", DIMS)
def test_a_plain_model_takes_no_codes_for_weights(dim: int) -> None:
    model, optimizer = quantised(dim=dim)
    train(model, optimizer, batches(3))
    before = copy.deepcopy(model.state_dict())
    assert not {"up.weight", "up.active"} & before.keys()
    with pytest.raises(RuntimeError, match=r'Missing key.*"up.weight".*[\s\S]*Unexpected key.*"up.weight_codes"'):
        Network().load_state_dict(before)
    plain = Network()
    plain.load_state_dict(plain_state_dict(model))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    grass.expand(model)
    assert_same_weights(plain, model)


def test_a_state_dict_without_weights_is_refused() -> None:
    model, _ = quantised()
    with pytest.raises(RuntimeError, match=r'Missing key.*"up\.weight_codes"'):
        model.load_state_dict({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casts_leave_scales_alone(dtype: torch.dtype) -> None:
    model, _ = quantised()
    scales = {name: layer.weight_scale.clone() for name, layer in compact_layers(model).items()}
    model.to(dtype)
    for name, layer in compact_layers(model).items():
        assert torch.equal(layer.weight_scale, scales[name])
        assert layer.weight.dtype == torch.int8
    assert {p.dtype for p in plain_state_dict(model).values()} == {dtype}


def test_distributed_checkpoint() -> None:
    """Its functions find the codes by their name."""
    model, other = quantised()[0], quantised()[0]
    with torch.no_grad():
        other.up.weight.zero_()
    set_model_state_dict(other, get_model_state_dict(model))
    assert_same_weights(other, model)


def test_transformers(tmp_path) -> None:
    """Weights are reported missing where there are codes, plain ones load; the model's dtype is its other weights'."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    grass.compact(model, rank=8, explore=0, weights="int8")
    ids = torch.arange(6).unsqueeze(0)
    assert model.dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 8)
    model.save_pretrained(tmp_path / "codes")
    _, loading = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "codes", output_loading_info=True)
    assert len(loading["missing_keys"]) == len(compact_layers(model))
    model.save_pretrained(tmp_path / "plain", state_dict=plain_state_dict(model))
    loaded, loading = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not loading["missing_keys"] | loading["unexpected_keys"]
    grass.expand(model)
    assert_same_weights(loaded, model)


def test_expand_gives_the_plain_model() -> None:
    model, optimizer = quantised(torch.bfloat16, update_interval=100)
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    x = batches(1, dtype=torch.bfloat16)[0][0]
    before, active = model(x), {n: (layer.selected, layer.active) for n, layer in compact_layers(model).items()}
    grass.expand(model)
    assert {type(m) for m in (model.up, model.mix, model.down)} == {nn.Linear}
    assert model.state_dict().keys() == Network().state_dict().keys()
    for name, (selected, rows) in active.items():
        weight = model.get_submodule(name).weight
        assert weight.dtype == torch.bfloat16
        assert weight.requires_grad
        assert torch.equal(weight[:, selected], rows.to(torch.bfloat16))
    torch.testing.assert_close(model(x), before, rtol=0.05, atol=0.05)  # active rows no longer rounded to 8 bits


def test_whole_decay_is_in_the_scales() -> None:
    model, optimizer = quantised(decay="all", weight_decay=0.1, lr=1e-2, update_interval=100)
    layer = compact_layers(model)["mix"]
    codes, scale = layer.weight.clone(), layer.weight_scale.clone()
    train(model, optimizer, batches(1))
    others = torch.ones(layer.matrix().shape[1], dtype=torch.bool)
    others[layer.selected] = False
    assert torch.equal(layer.weight[:, others], codes[:, others])
    torch.testing.assert_close(layer.weight_scale[others], scale[others] * (1 - 1e-3))


def test_conv1d() -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(20, 12)
    model, x = nn.Sequential(conv), torch.randn(4, 12)
    expected = model(x)
    assert grass.compact(model, rank=3, explore=0, weights="int8", targets=["0"]) == ["0"]
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.01)  # 8 bits of weights of size 0.02
    optimizer = GrassAdamW(model, **OPTIONS)
    for _ in range(6):
        model(x).square().mean().backward()
        optimizer.step()
    state = through_file(model.state_dict())
    assert state["0.weight_codes"].dtype == torch.int8
    assert plain_state_dict(model)["0.weight"].shape == (12, 20)
    trained = model(x)
    model.load_state_dict(state)
    assert torch.equal(model(x), trained)
    model.load_state_dict({"0.weight": torch.ones(12, 20), "0.bias": torch.zeros(20)})
    torch.testing.assert_close(model(x), x.sum(1, keepdim=True).expand(4, 20))
    grass.expand(model)
    assert model[0].weight.shape == (12, 20)
    assert model[0].weight.is_contiguous()


def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False)


def compiled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(model, fullgraph=True)(x)


@pytest.mark.parametrize("run", [checkpointed, pytest.param(compiled, marks=pytest.mark.slow)])
def test_gradients_under(run) -> None:
    model, _ = quantised()
    other = copy.deepcopy(model)
    batch = batches(1)[0]
    loss_of(lambda x: run(model, x), batch).backward()
    loss_of(other, batch).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_autocast() -> None:
    model, optimizer = quantised()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batches(1)[0])
    loss.backward()
    assert all(layer.active.grad.dtype == torch.float32 for layer in compact_layers(model).values())
    optimizer.step()


def test_misuse() -> None:
    with pytest.raises(ValueError, match="int8"):
        grass.compact(Network(), rank=3, explore=0, weights="int4")
    model, _ = quantised()
    assert grass.compact(model, rank=3, explore=0, weights="int8") == ["up", "mix", "down"]
    with pytest.raises(ValueError, match=r"weights.*expand"):
        grass.compact(model, rank=3, explore=0)
    assert "rank=3, dim=1, weights=int8" in repr(model.up)
    assert isinstance(model.up.storage, Int8Storage)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_step_shows_in_the_loss(dtype: torch.dtype, dim: int, broken: float, caplog) -> None:
    """Codes have no NaN: the scale has it. Nothing is taken for a change of the weight, and repaired rows count."""
    model, optimizer = quantised(dtype, dim, selection="uniform", update_interval=100)
    layer, data = model.up, batches(4, dtype=dtype)
    train(model, optimizer, data[:2])
    with torch.no_grad():
        whole = layer.active.clone()
    loss_of(model, data[2]).backward()
    layer.active.grad.select(dim, 0)[0] = broken
    optimizer.step()
    optimizer.zero_grad()
    assert loss_of(model, data[3]).isnan()
    with torch.no_grad():
        layer.active.copy_(whole)
    assert loss_of(model, data[3]).isfinite()
    assert not caplog.messages
