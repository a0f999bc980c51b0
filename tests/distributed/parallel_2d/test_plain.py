"""A model on a grid computes, trains and saves as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grass.distributed.parallel_2d.checks import ARCHITECTURES
from tests.distributed.parallel_2d.decoders import (
    decoder,
    ids,
    labels_of,
    on_grid,
    plain_loss,
    whole_gradients,
)
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""In float64 only the order of sums differs."""

Case = tuple[str, tuple[int, ...], dict[str, Any]]
CASES: list[Case] = [
    *((model_type, (2, 2), {}) for model_type in ARCHITECTURES),
    ("llama", (2, 2), {"panels": 4}),
    ("llama", (4, 1), {}),
    ("llama", (4, 1), {"panels": 2}),
]
LARGER: list[Case] = [("llama", (4, 2), {"panels": 2}), ("llama", (2, 2, 2), {})]


def computed(rank: int, cases: list[Case]) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    every = []
    for model_type, shape, options in cases:
        model = on_grid(decoder(model_type), *shape, **options)
        with torch.no_grad():
            logits = model(input_ids=ids(0)).logits
        loss = model(input_ids=ids(1), labels=labels_of(ids(1))).loss
        loss.backward()
        every.append((logits, loss.detach(), whole_gradients(model)))
    return every


def assert_computes_as_one_process(cases: list[Case], size: int) -> None:
    ranks = run_world(computed, size, cases)
    for number, (model_type, *_) in enumerate(cases):
        model = decoder(model_type)
        with torch.no_grad():
            logits = model(input_ids=ids(0)).logits
        loss = plain_loss(model, ids(1))
        loss.backward()
        for every in ranks:
            own_logits, own_loss, gradients = every[number]
            torch.testing.assert_close(own_logits, logits, **EXACT)
            torch.testing.assert_close(own_loss, loss.detach(), **EXACT)
            assert gradients.keys() == dict(model.named_parameters()).keys()
            assert_close(gradients, whole_gradients(model), **EXACT)


@pytest.mark.slow
def test_logits_loss_and_gradients() -> None:
    assert_computes_as_one_process(CASES, 4)


@pytest.mark.slow
def test_eight_ranks() -> None:
    """Also two replicas, which see the same batch here."""
    assert_computes_as_one_process(LARGER, 8)
