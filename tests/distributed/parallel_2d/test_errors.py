"""What a grid refuses, before anything has changed; ranks that differ or die."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import grass
from grass import GrassAdamW
from grass.distributed import parallelize_2d
from tests.distributed.parallel_2d.decoders import decoder, ids, labels_of, mesh_of, on_grid
from tests.distributed.parallel_2d.test_compact import ROWS, train_step
from tests.distributed.world import HANG, attempt_world, run_world


def gpt2() -> Any:
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=24, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config)


MODELS: list[tuple[Any, type[Exception], str]] = [
    (lambda: decoder(num_key_value_heads=1), ValueError, "key and value heads: 1 cannot be divided by 2"),
    (lambda: decoder(vocab_size=25), ValueError, "vocabulary: 25 cannot be divided by 2"),
    (lambda: decoder(intermediate_size=33), ValueError, "gate_proj: 33 cannot be divided by 2"),
    (lambda: decoder(tie_word_embeddings=True), TypeError, "tied to the embedding"),
    (gpt2, TypeError, "not gpt2"),
    (lambda: nn.Linear(4, 4), TypeError, "Linear is no language model"),
]


def refused(rank: int) -> int:
    """Models, meshes and settings that a grid does not take."""
    count = 0
    for build, error, message in MODELS:
        model = build()
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(error, match=message):
            parallelize_2d(model, mesh_of(2, 2))
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert not any(hasattr(p, "to_local") for p in model.parameters())
        count += 1
    for shape, message in (((1, 4), "two rows or more"), ((4,), "two named dimensions")):
        with pytest.raises(ValueError, match=message):
            parallelize_2d(decoder(), mesh_of(*shape))
    with pytest.raises(TypeError, match="must be a DeviceMesh"):
        parallelize_2d(decoder(), (2, 2))
    with pytest.raises(ValueError, match="panels=0"):
        parallelize_2d(decoder(), mesh_of(2, 2), panels=0)
    with pytest.raises(ValueError, match="batch_size=3"):
        parallelize_2d(decoder(), mesh_of(2, 2), batch_size=3)
    with pytest.raises(ValueError, match="16 cannot be divided by 6"):
        parallelize_2d(decoder(), mesh_of(2, 2), panels=3)
    _refused_afterwards(on_grid(decoder(), 2, 2))
    return count


def _refused_afterwards(model: Any) -> None:
    """Calls on a model that is spread already."""
    with pytest.raises(TypeError, match="DTensors already"):
        parallelize_2d(model, mesh_of(2, 2))
    with pytest.raises(ValueError, match="A batch of 3 cannot be divided among 2 rows"):
        model(input_ids=ids(0)[:3], labels=ids(0)[:3])
    with pytest.raises(ValueError, match="dim=0"):
        grass.compact(model, rank=0.25, dim=0)
    with pytest.raises(ValueError, match="weights='int8'"):
        grass.compact(model, rank=0.25, weights="int8")
    with pytest.raises(ValueError, match="rank=3: must be a multiple of the 2 strata"):
        grass.compact(model, rank=3)
    grass.compact(model, **ROWS)
    with pytest.raises(ValueError, match="explore=3: must be a multiple"):
        GrassAdamW(model, explore=3)
    with pytest.raises(ValueError, match="offload"):
        GrassAdamW(model, offload="cpu")
    with pytest.raises(ValueError, match="grid"):
        grass.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), model)
    optimizer = GrassAdamW(model, moment_dtype="8bit")
    model(input_ids=ids(0), labels=labels_of(ids(0))).loss.backward()
    with pytest.raises(ValueError, match="cannot be sharded"):
        optimizer.step()


@pytest.mark.slow
def test_what_is_refused() -> None:
    assert run_world(refused, 4) == [len(MODELS)] * 4


def differing(rank: int, what: str) -> None:
    """One rank has another setting, or another model."""
    if what == "panels":
        parallelize_2d(decoder(), mesh_of(2, 2), panels=2 if rank == 3 else 1)
    elif what == "the shape of model.embed_tokens.weight":
        parallelize_2d(decoder(vocab_size=48 if rank == 3 else 24), mesh_of(2, 2))
    else:
        model = on_grid(decoder(), 2, 2)
        grass.compact(model, **ROWS)
        train_step(model, GrassAdamW(model, seed=int(rank == 3)), 0)


DIFFERENCES = ["panels", "the shape of model.embed_tokens.weight", "seed of group 0"]


@pytest.mark.slow
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_named_on_every_rank(what: str) -> None:
    for outcome in attempt_world(differing, 4, what):
        assert outcome.error is not None
        assert f"The ranks differ in {what}" in outcome.error
        assert "on ranks [3]" in outcome.error


def dying(rank: int) -> None:
    model = on_grid(decoder(), 2, 2)
    grass.compact(model, **ROWS)
    optimizer = GrassAdamW(model)
    for step in range(3):
        if rank == 3 and step == 1:
            os._exit(1)
        train_step(model, optimizer, step)


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_on_every_rank() -> None:
    for outcome in attempt_world(dying, 4):
        assert outcome.error is not None
        assert outcome.error != HANG
