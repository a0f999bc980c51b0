"""Between the calls of a model on a grid: weights changed from outside, other conversions, losses of one's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import grass
from grass import GrassAdamW
from tests.distributed.parallel_2d.decoders import decoder, ids, labels_of, on_grid, plain_loss, whole, whole_gradients
from tests.distributed.parallel_2d.test_compact import ROWS, train_step
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

EXACT = {"rtol": 1e-11, "atol": 1e-11}
"""In float64 only the order of sums differs."""


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits
    return logits


def assert_as_in_one_process(model: Any) -> None:
    """What a model on a grid computes is what a plain one with its weights does."""
    plain = decoder()
    plain.load_state_dict(whole(model.state_dict()))
    torch.testing.assert_close(logits_of(model, ids(5)), logits_of(plain, ids(5)), **EXACT)


def changed(rank: int, cache_panels: bool) -> bool:
    """Changes from outside after a forward, between steps, of copies; evaluation in inference mode."""
    model = on_grid(decoder(), 2, 2, cache_panels=cache_panels)
    grass.compact(model, **ROWS)
    optimizer = GrassAdamW(model, lr=1e-2)
    logits_of(model, ids(0))
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    assert_as_in_one_process(model)
    train_step(model, optimizer, 0)
    copied = copy.deepcopy(model)
    for step in range(1, 4):
        train_step(model, optimizer, step)
        with torch.no_grad():
            for theirs, ours in zip(copied.parameters(), model.parameters(), strict=True):
                theirs.lerp_(ours, 0.3)
                if step == 2:
                    ours.mul_(0.5)
        assert_as_in_one_process(model)
        assert_as_in_one_process(copied)
    _trains_as(model, copy.deepcopy(model))
    with torch.inference_mode():
        inferred = model(input_ids=ids(5)).logits
    torch.testing.assert_close(inferred, logits_of(model, ids(5)), rtol=0.0, atol=0.0)
    _keeps_changes(model)
    assert logits_of(model.to(torch.bfloat16), ids(5)).dtype == torch.bfloat16
    return True


def _trains_as(model: Any, copied: Any) -> None:
    """A copy goes its own way, with columns of its own."""
    optimizers = [GrassAdamW(m, lr=1e-2, seed=3) for m in (model, copied)]
    for step in range(8):
        for m, optimizer in zip((model, copied), optimizers, strict=True):
            train_step(m, optimizer, step)
    assert_close(whole(copied.state_dict()), whole(model.state_dict()), rtol=0.0, atol=0.0)


def _keeps_changes(model: Any) -> None:
    """A step with a rate of zero leaves weights as they were set by hand."""
    optimizer = GrassAdamW(model, lr=0.0)
    train_step(model, optimizer, 0)
    weights = [module.weight for module in model.modules() if hasattr(module, "chosen")]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    train_step(model, optimizer, 1)
    assert not any(weight.full_tensor().any() for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("cache_panels", [pytest.param(False, marks=pytest.mark.soak), True])
def test_changes_from_outside_are_seen(cache_panels: bool) -> None:
    assert all(run_world(changed, 4, cache_panels))


def converted_again(rank: int, cache_panels: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Other columns after ``expand``: the gradient of the first layer's, and which they are."""
    model = on_grid(decoder(), 2, 2, cache_panels=cache_panels)
    for seed, share in ((0, 0.5), (7, 0.25)):
        grass.compact(model, rank=share, explore=0, seed=seed)
        model(input_ids=ids(0), labels=labels_of(ids(0))).loss.backward()
        gradients = whole_gradients(model)
        model.zero_grad()
        chosen = [
            module.chosen + rank // 2 * module.shape[1] for module in model.modules() if hasattr(module, "chosen")
        ]
        grass.expand(model)
    return chosen, gradients


@pytest.mark.slow
@pytest.mark.parametrize("cache_panels", [False, True])
def test_converting_again(cache_panels: bool) -> None:
    plain = decoder()
    plain_loss(plain, ids(0)).backward()
    expected = whole_gradients(plain)
    ranks = run_world(converted_again, 4, cache_panels)
    names = [name.removesuffix(".active") for name in ranks[0][1] if name.endswith(".active")]
    for number, name in enumerate(names):
        columns = torch.cat([ranks[0][0][number], ranks[2][0][number]])
        torch.testing.assert_close(ranks[0][1][f"{name}.active"], expected[f"{name}.weight"][:, columns], **EXACT)


def own_loss(rank: int) -> dict[str, Tensor]:
    model = on_grid(decoder(), 2, 2)
    logits = model(input_ids=ids(0)).logits
    F.cross_entropy(logits.flatten(0, 1), ids(0).flatten(), label_smoothing=0.1).backward()
    return whole_gradients(model)


@pytest.mark.slow
def test_a_loss_of_ones_own_from_the_logits() -> None:
    model = decoder()
    logits = model(input_ids=ids(0)).logits
    F.cross_entropy(logits.flatten(0, 1), ids(0).flatten(), label_smoothing=0.1).backward()
    for gradients in run_world(own_loss, 4):
        assert_close(gradients, whole_gradients(model), **EXACT)


def wrong_calls(rank: int) -> bool:
    model = on_grid(decoder(), 2, 2)
    tokens = ids(0)
    calls: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input_ids": tokens + 24}, RuntimeError, "Token ids must be"),
        ({"input_ids": tokens, "labels": tokens + 24}, RuntimeError, "Labels must be"),
        ({"input_ids": tokens, "labels": tokens[:2]}, ValueError, "labels of shape"),
        ({"input_ids": tokens, "labels": tokens, "ignore_index": 5}, ValueError, "ignore_index"),
        ({"input_ids": tokens, "output_hidden_states": True}, ValueError, "output_hidden_states"),
        ({"input_ids": tokens, "return_dict": False}, ValueError, "return_dict"),
        ({"inputs_embeds": torch.zeros(4, 6, 16)}, ValueError, "inputs_embeds"),
    ]
    logits_of(model, tokens)
    for arguments, error, message in calls:
        with pytest.raises(error, match=message):
            model(**arguments)
    with pytest.raises(TypeError, match="keyword"):
        model(tokens, None)
    model.loss_function = lambda *args, **kwargs: torch.zeros(())
    with pytest.raises(ValueError, match="ForCausalLMLoss"):
        model(input_ids=tokens, labels=tokens)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        on_grid(decoder(attention_dropout=0.1), 2, 2)
    other = on_grid(decoder(), 2, 2)
    with pytest.raises(ValueError, match="The ranks differ in input_ids"):
        other(input_ids=ids(rank))
    return True


@pytest.mark.slow
def test_calls_that_a_grid_refuses() -> None:
    assert all(run_world(wrong_calls, 4))


def converted_head(rank: int) -> float:
    """Replicas whose batches have other lengths: their chunks of the loss differ in number."""
    model = on_grid(decoder(), 2, 2, 1, chunk_tokens=2)
    grass.compact(model, rank=0.5, targets=["lm_head"])
    tokens = ids(0)[:, :4] if rank < 2 else ids(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.slow
def test_a_converted_head_with_replicas() -> None:
    model = decoder()
    short, long = ids(0)[:, :4], ids(0)
    with torch.no_grad():
        sums = [
            F.cross_entropy(model(input_ids=t).logits[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="sum")
            for t in (short, long)
        ]
    expected = float(sum(sums)) / (short[:, 1:].numel() + long[:, 1:].numel())
    for loss in run_world(converted_head, 4):
        assert loss == pytest.approx(expected, rel=1e-11)
