"""The most bytes that a step has on the stand-in are those that :func:`grass.memory.plan` predicts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import standin

standin.install()

import grass  # noqa: E402
from grass.chunked_loss import chunk_loss  # noqa: E402
from grass.memory import Setting, plan  # noqa: E402
from grass.memory.architecture import Architecture  # noqa: E402
from tests.memory.architectures import llama  # noqa: E402

DEVICE = "standin:0"
COMMON: dict[str, Any] = {"offload": True, "rank": 1 / 8, "seq_len": 128, "batch_size": 2}


def built(method: str, config: Any, setting: Setting) -> tuple[Any, grass.GrassAdamW]:
    """A model on the device, streamed or whole, and its optimizer on the host."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(config, dtype=setting.dtype).train()
    chunk_loss(model, setting.chunk_tokens)
    if method == "Grass":
        grass.compact(model, rank=setting.rank, dim=setting.dim, dtype=setting.active_dtype)
    if not setting.stream:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.to(DEVICE)
    params = model.parameters() if method == "AdamW" else model
    optimizer = grass.GrassAdamW(params, lr=1e-3, offload=grass.Offload(fraction=0.0))
    if setting.stream:
        grass.stream(model, DEVICE, cache=setting.cache, offload_activations=setting.host_activations)
    return model, optimizer


def step(model: nn.Module, optimizer: grass.GrassAdamW, setting: Setting) -> None:
    """One step, to its end."""
    ids = torch.randint(256, (setting.batch_size, setting.seq_len)).to(DEVICE)
    model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.offload.finish()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Grass", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {"stream": True},
        {"stream": True, "host_activations": True},
        {"stream": True, "cache": 40_000_000},
        {"stream": False},
    ],
    ids=["streamed", "streamed, activations on the host", "streamed, cached", "offloaded"],
)
def test_peak(method: str, options: dict[str, Any]) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    config, setting = llama("60m", 6), Setting(**COMMON, **options)
    model, optimizer = built(method, config, setting)
    step(model, optimizer, setting)
    torch.accelerator.reset_peak_memory_stats()
    step(model, optimizer, setting)
    planned = plan(method, Architecture.from_config(config), setting).peak
    measured = torch.accelerator.max_memory_allocated() - before
    print(f"{method}, {options}: {measured:,} bytes, planned {planned:,}: {measured / planned:.3f}")
    assert measured == pytest.approx(planned, rel=0.05)
