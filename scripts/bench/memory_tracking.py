"""What :func:`grass.memory.plan` claims, measured by torch's memory tracker on fake or real tensors."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import set_stance
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from tracked_methods import BUILDERS, prepare
from transformers import AutoModelForCausalLM, PretrainedConfig

from grass.chunked_loss import chunk_loss
from grass.compact_mode.layer import CompactLayer
from grass.kernels.moment_codes import dynamic_map
from grass.memory import Setting, state_bytes
from grass.memory.tracing import with_causal_attention
from grass.stepping import compact, dense

sys.path.append(str(Path(__file__).parents[1]))
from training.run.models import enable_checkpointing

Snapshot = dict[Any, int]
"""Bytes by kind of reference, and ``"Total"``."""


class TrackedMemory(NamedTuple):
    """Bytes by torch's ``MemTracker``: the largest of each category, as :class:`grass.memory.Plan` names them.

    Everything is on the CPU here, so the tracker counts the bank too. It is ``host``, and ``peak`` is without it.
    """

    weights_and_active_rows: int
    gradients: int
    moments: int
    activations: int
    peak: int
    host: int


def track(
    method: str, config: PretrainedConfig, setting: Setting, *, refresh: bool = False, real: bool = False
) -> TrackedMemory:
    """One training step, after one that made the optimizer's state.

    Args:
        method: one of :data:`grass.memory.METHODS`.
        config: of a causal language model.
        setting: how to train it.
        refresh: make it a step that ends with a refresh.
        real: compute. Otherwise tensors are fake: they have sizes but no contents.

    A refresh reads contents, so on fake tensors its step ends with backward. So does the step of 8-bit AdamW, which
    runs compiled and has temporaries only where it does not.
    """
    prepare(method)
    with nullcontext() if real else fake_tensors(), set_stance("force_eager"):
        model: Any = AutoModelForCausalLM.from_config(with_causal_attention(config), dtype=setting.dtype)  # type: ignore[no-untyped-call]
        optimizer = BUILDERS[method](model, setting, 2 if refresh else 200)
        model.train()
        if setting.checkpointing:
            enable_checkpointing(model)
        if setting.chunk_tokens:
            chunk_loss(model, setting.chunk_tokens)
        make_state(optimizer, real)
        ids = torch.zeros(setting.batch_size, setting.seq_len, dtype=torch.long)
        forward, backward, peak = tracked_step(
            model,
            optimizer,
            {"input_ids": ids, "labels": ids, "shift_labels": ids},
            steps=(real or not refresh) and method != "8-bit AdamW",
        )
    state = state_bytes(optimizer)
    return TrackedMemory(
        weights_and_active_rows=peak[_MemRefType.PARAM] + peak[_MemRefType.BUFFER],
        gradients=backward[_MemRefType.GRAD],
        moments=state.device,
        activations=forward[_MemRefType.ACT],
        peak=peak["Total"] - state.host,
        host=state.host,
    )


def tracked_step(
    model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor], *, steps: bool = True
) -> tuple[Snapshot, Snapshot, Snapshot]:
    """Bytes after the forward and after the backward of a step, and at the largest moment; the state exists before.

    ``steps=False`` ends with backward.
    """
    tracker = _WholeModelTracker()
    sketches = [t for m in model.modules() if isinstance(m, CompactLayer) for t in (m.sketch, m.signs)]
    tracker.track_external(model, optimizer, *(t for t in sketches if t is not None))
    _skip_frozen(tracker, model)
    with tracker:
        loss = model(**batch).loss
        forward = _snapshot(tracker, "current")
        loss.backward()
        backward = _snapshot(tracker, "current")
        if steps:
            optimizer.step()
    return forward, backward, _snapshot(tracker, "peak")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A fake mode in which all experts have tokens, and with a cache of 8-bit levels of its own.

    Fake levels must not outlive it, nor real ones enter it.
    """
    dynamic_map.cache_clear()

    def every(grad: Tensor, like: Tensor) -> list[int]:
        return list(range(len(grad)))

    try:
        with FakeTensorMode(), patch.object(compact, "with_tokens", every), patch.object(dense, "with_tokens", every):
            yield
    finally:
        dynamic_map.cache_clear()


class _WholeModelTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Keeps the whole model's peak and not each module's, which takes time quadratic in the number of layers."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, _NONE
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules


_NONE: Any = {}


def make_state(optimizer: Optimizer, real: bool) -> None:
    """Make the state by one step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p) if real else torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def _skip_frozen(tracker: MemTracker, model: nn.Module) -> None:
    """Tell the tracker that frozen parameters have their gradient hooks: it would fail to register them."""
    for p in model.parameters():
        if not p.requires_grad:
            handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[p] = handles


def _snapshot(tracker: MemTracker, kind: str) -> Snapshot:
    return tracker.get_tracker_snapshot(kind)[torch.device("cpu")]
