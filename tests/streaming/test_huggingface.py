"""Hugging Face models train streamed as they do resident and checkpointed, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grass
from grass.compact_mode.layer import CompactLayer
from tests.offload.training import same
from tests.streaming.architectures import ARCHITECTURES, build, network, quick_and_slow, train

UNITS = {"t5": 6, "albert": 1}
STEPS = 5


@pytest.mark.parametrize("architecture", quick_and_slow(*(name for name in ARCHITECTURES if name != "llama")))
def test_training(architecture: str) -> None:
    """Also with the cache that models make in training if they are not told otherwise."""
    resident, by = build(architecture, streamed=False)
    streamed, optimizer = build(architecture, streamed=True)
    assert len(streamed.handle.units) == UNITS.get(architecture, 4)
    assert any(isinstance(part, CompactLayer) for unit in streamed.handle.units for part in unit.module.modules())
    assert train(streamed, optimizer, STEPS) == train(resident, by, STEPS)
    assert same(streamed.state_dict(), resident.state_dict())
    assert same(optimizer.state_dict()["state"], by.state_dict()["state"])
    assert not same(streamed.state_dict(), network(architecture).state_dict())


@pytest.mark.parametrize("architecture", quick_and_slow("gpt2", "t5", "megatron"))
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_the_user_is_not_done_twice(architecture: str, reentrant: bool) -> None:
    """The result is the resident model's with these checkpoints, and no unit comes more often than without."""
    models = []
    for streamed in (False, True):
        model, optimizer = build(architecture, streamed=streamed, checkpointed=False)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # reentrant checkpoints need it
        models.append((train(model, optimizer, STEPS), model.state_dict()))
    assert same(*models)
    plain, by = build(architecture, streamed=True)
    train(plain, by, STEPS)
    extra = len(model.handle.units) if reentrant else 0  # a forward without gradients is another kind of use
    assert 0 <= model.handle.counts.loads - plain.handle.counts.loads <= extra


def test_checkpointing_by_the_user_keeps_inputs_on_the_device() -> None:
    model, _ = build("llama", streamed=True, offload_activations=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(input_ids=torch.arange(8).view(1, 8))
    model.gradient_checkpointing_disable()
    model(input_ids=torch.arange(8).view(1, 8))


@pytest.mark.parametrize("architecture", quick_and_slow("gpt2", "t5", "megatron"))
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_cache_in_training(architecture: str, use_cache: bool) -> None:
    resident, by = build(architecture, streamed=False)
    streamed, optimizer = build(architecture, streamed=True, offload_activations=True)
    assert train(streamed, optimizer, 3, use_cache=use_cache) == train(resident, by, 3, use_cache=False)


@pytest.mark.parametrize("architecture", quick_and_slow("gpt2", "megatron"))
def test_a_cache_that_holds_tokens_is_no_input_of_training(architecture: str) -> None:
    model, optimizer = build(architecture, streamed=True)
    ids = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="takes no cache that holds 8 tokens"):
        model(ids, past_key_values=cache)
    assert train(model, optimizer, 2) == train(*build(architecture, streamed=False), 2)


def test_tied_embeddings_in_a_unit_stay_on_the_device() -> None:
    units = ["model.embed_tokens", "model.layers", "lm_head"]
    resident, by = build("tied llama", streamed=False)
    streamed, optimizer = build("tied llama", streamed=True, units=units)
    tied = streamed.lm_head.weight
    assert tied is streamed.model.embed_tokens.weight
    assert [unit.nbytes for unit in streamed.handle.units if unit.module is streamed.lm_head] == [0]
    assert train(streamed, optimizer, STEPS) == train(resident, by, STEPS)
    assert streamed.lm_head.weight is tied is streamed.model.embed_tokens.weight
    assert same(streamed.state_dict(), resident.state_dict())


def test_adapters_of_peft() -> None:
    """Only the adapters train; the frozen layers travel all the same."""
    peft = pytest.importorskip("peft")

    def run(streamed: bool) -> tuple[list[float], Any]:
        model = peft.get_peft_model(network("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        if streamed:
            assert len(grass.stream(model, device="cpu").units) == 4
        losses = train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), STEPS)
        return losses, peft.get_peft_model_state_dict(model)

    assert same(run(True), run(False))
