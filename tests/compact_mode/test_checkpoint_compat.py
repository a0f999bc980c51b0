"""Checkpoints of a converted model are those of the plain one."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import (
    DIMS,
    Network,
    batches,
    compact_layers,
    converted,
    plain_copy,
    through_file,
    train,
)
from tests.reference import train as train_llama


@pytest.mark.parametrize("active", [None, torch.float32], ids=["same dtype", "fp32 rows"])
@pytest.mark.parametrize("dim", DIMS)
def test_state_dict(dim: int, active: torch.dtype | None) -> None:
    """Keys, their order, shapes, dtypes and values are those of the plain model."""
    model, optimizer = converted(torch.bfloat16, dim=dim, active=active)
    assert list(model.state_dict()) == list(Network(torch.bfloat16).state_dict())
    train(model, optimizer, batches(5, dtype=torch.bfloat16))
    state, plain = model.state_dict(), plain_copy(model).state_dict()
    assert list(state) == list(plain)
    for name, value in plain.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name
    assert list(model.state_dict(prefix="p.")) == [f"p.{name}" for name in plain]
    assert model.state_dict(keep_vars=True)["up.weight"] is model.up.weight


@pytest.mark.parametrize("dim", DIMS)
def test_loads_strictly_both_ways(dim: int) -> None:
    model, optimizer = converted(dim=dim)
    train(model, optimizer, batches(5))
    (x, _), plain = batches(1)[0], Network(seed=1)
    plain.load_state_dict(through_file(model.state_dict()), strict=True)
    torch.testing.assert_close(plain(x), model(x))

    other, _ = converted(dim=dim, seed=3)
    result = other.load_state_dict(through_file(plain.state_dict()), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for layer in compact_layers(other).values():
        assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected)), "rows follow the weight"
    torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize("dim", DIMS)
def test_assigned_weights(dim: int) -> None:
    """``assign=True`` puts other tensors, in row-major layout, in the place of the weights."""
    model, optimizer = converted(dim=dim)
    model.load_state_dict(Network(seed=5).state_dict(), assign=True)
    assert not model.up.weight.requires_grad
    train(model, optimizer, batches(6))
    for name, layer in compact_layers(model).items():
        assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected)), name


def test_missing_and_unexpected_keys_are_still_reported() -> None:
    model, _ = converted()
    state = model.state_dict()
    state["extra"] = state.pop("mix.weight")
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["mix.weight"]
    assert result.unexpected_keys == ["extra"]
    with pytest.raises(RuntimeError, match=r"mix\.weight"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "up.weight": torch.zeros(2, 2)})


def test_fine_rows_survive_loading_their_own_weights() -> None:
    model, optimizer = converted(torch.bfloat16, active=torch.float32, lr=1e-4)
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    before = model.up.active.detach().clone()
    assert not torch.equal(before.bfloat16().float(), before), "the rows hold more than the weight can"
    model.load_state_dict(through_file(model.state_dict()))
    assert torch.equal(model.up.active, before)
    model.load_state_dict(Network(torch.bfloat16, seed=2).state_dict())
    assert torch.equal(model.up.active, model.up.weight.index_select(1, model.up.selected).float())


@pytest.fixture
def quiet_transformers(caplog: pytest.LogCaptureFixture):
    """Transformers' loggers propagate to caplog, and Python warnings are errors."""
    transformers = pytest.importorskip("transformers")
    logger = transformers.utils.logging
    logger.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield transformers
    logger.disable_propagation()


def assert_same_model(ours: nn.Module, theirs: nn.Module, tokens: Tensor) -> None:
    """Equal weights, to the bit, and equal logits but for the order of sums, which follows the memory layout."""
    weights = theirs.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("dim", DIMS)
def test_save_pretrained(quiet_transformers, caplog, tiny_llama, token_batches, tmp_path, dim: int, tied: bool) -> None:
    """A trained model, saved in safetensors, opened by plain transformers: no message, equal weights and logits."""
    model = tiny_llama(tie_word_embeddings=tied)
    grass.compact(model, rank=0.25, explore=0, dim=dim)
    train_llama(model, GrassAdamW(model, lr=1e-2, update_interval=2), token_batches[:3])
    caplog.clear()
    model.save_pretrained(tmp_path)
    other, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not caplog.records, caplog.text
    assert_same_model(other, model, token_batches[0])
    expected = tiny_llama(tie_word_embeddings=tied)
    expected.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "model.safetensors").stat().st_size == (tmp_path / "plain/model.safetensors").stat().st_size
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (tmp_path / "plain/config.json").read_text()
    )


@pytest.mark.parametrize("dim", DIMS)
def test_gpt2(quiet_transformers, caplog, tmp_path, dim: int) -> None:
    """``Conv1D`` weights, tied head."""
    config = quiet_transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    model = quiet_transformers.GPT2LMHeadModel(config).eval()
    names = grass.compact(model, rank=4, explore=0, dim=dim)
    assert {name.rpartition(".")[2] for name in names} == {"c_attn", "c_proj", "c_fc"}
    tokens = torch.arange(32).view(2, 16)
    train_llama(model, GrassAdamW(model, lr=1e-2, update_interval=2), [tokens] * 3)
    caplog.clear()
    model.save_pretrained(tmp_path)
    other, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not caplog.records, caplog.text
    assert_same_model(other, model, tokens)


def test_loading_into_a_converted_model(tiny_llama, token_batches, tmp_path) -> None:
    """Weights of a plain checkpoint, loaded after conversion as training scripts do."""
    plain = tiny_llama(seed=4)
    model = tiny_llama()
    grass.compact(model, rank=4, explore=0)
    model.load_state_dict(plain.state_dict())
    assert_same_model(model, plain, token_batches[0])


def test_torch_leaves_out_converted_weights_with_ignore_frozen_params() -> None:
    """They are frozen, and their active rows are in no ``state_dict``: docs/errors.md warns of it."""
    model, _ = converted()
    names = {f"{name}.weight" for name in compact_layers(model)}
    frozen_left_out = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not names & frozen_left_out.keys()
    assert get_model_state_dict(model).keys() == frozen_left_out.keys() | names
