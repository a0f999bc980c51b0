"""Streaming to a GPU. The host steps the parameters there and the GPU here, so values agree to rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from tests.streaming.models import Network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def losses(*, streamed: bool, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model: Any = Network(6, width=64, dropout=0.0, checkpointed=not streamed)
    grass.compact(model, rank=16)
    if not streamed:
        model.cuda()
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=4, offload="cpu")
    if streamed:
        grass.stream(model, "cuda", **options)
    found = []
    for step in range(12):
        ids = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(step)).cuda()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("options", [{}, {"offload_activations": True}, {"cache": 1 << 30}])
def test_trains_as_the_resident_model(options: dict[str, Any]) -> None:
    expected = losses(streamed=False)
    assert losses(streamed=True, **options) == pytest.approx(expected, rel=2e-3)  # 12 steps of float32
    assert expected[-1] < expected[0]


def test_memory_of_three_units() -> None:
    model = Network(24, width=512)
    grass.compact(model, rank=64)
    optimizer = GrassAdamW(model, lr=1e-3, offload="cpu")
    stream = grass.stream(model, "cuda")
    ids = torch.randint(32, (2, 8)).cuda()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.offload.finish()
    assert torch.cuda.max_memory_allocated() - before < 4.5 * stream.units[0].nbytes
