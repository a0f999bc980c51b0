"""Activation checkpointing recomputes the forward pass; nothing else changes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import DIMS, Network, assert_same_weights, batches, converted, selections
from tests.reference import train as train_llama


class Checkpointed(nn.Module):
    """A network whose layers run under ``checkpoint``."""

    def __init__(self, network: Network, use_reentrant: bool) -> None:
        super().__init__()
        self.network = network
        self.run = partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # a reentrant checkpoint is differentiated only if its input is
        n = self.network
        return self.run(lambda h: n.down(torch.tanh(n.mix(h))), self.run(lambda h: torch.tanh(n.norm(n.up(h))), x))


@pytest.mark.parametrize("update_interval", [1, 4])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("dim", DIMS)
def test_equal_to_no_checkpointing(dim: int, use_reentrant: bool, update_interval: int) -> None:
    """To the bit over three refreshes, the sketch gathered once per step although the forward runs twice."""
    runs = []
    for wrap in (partial(Checkpointed, use_reentrant=use_reentrant), lambda network: network):
        network, optimizer = converted(dim=dim, update_interval=update_interval, sketch_size=4)
        model, chosen = wrap(network), []
        for x, y in batches(13):
            optimizer.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                (model(part) - target).square().mean().backward()
            optimizer.step()
            chosen.append(selections(network))
        runs.append((network, chosen))
    (ours, our_rows), (theirs, their_rows) = runs
    assert our_rows == their_rows
    assert len({str(rows) for rows in our_rows}) >= 4
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_in_transformers(tiny_llama, token_batches, use_reentrant: bool) -> None:
    """Switched on as users do it, with frozen embeddings as in fine-tuning."""
    runs = []
    for checkpointed in (True, False):
        model = tiny_llama().train()
        model.get_input_embeddings().requires_grad_(False)
        grass.compact(model, rank=0.25, explore=0)
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        train_llama(model, GrassAdamW(model, lr=1e-2, update_interval=2), token_batches[:6])
        runs.append(model)
    assert_same_weights(*runs)
