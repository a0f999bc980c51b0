"""What :func:`grass.memory.estimate_llama` claims, measured: torch's memory tracker on fake tensors of full size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, LlamaConfig

import grass
from grass.training.models import build_llama


class TrackedMemory(NamedTuple):
    """Bytes by torch's ``MemTracker``, at the moments named in :func:`track_compact_llama`."""

    parameters: int
    gradients: int
    state: int
    activations: int
    peak: int


def track_compact_llama(
    config: LlamaConfig,
    *,
    rank: int,
    dim: int = 1,
    batch_size: int = 1,
    seq_len: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    active_dtype: torch.dtype = torch.float32,
) -> TrackedMemory:
    """Run two training steps of a converted LLaMA on fake tensors, which have sizes but no contents.

    Gradients are read after backward, activations after forward, the rest over both steps. Arguments as in
    :func:`grass.memory.estimate_llama`.
    """
    AttentionInterface.register("causal_sdpa", _causal_attention)
    config._attn_implementation = "causal_sdpa"
    with FakeTensorMode():
        model = build_llama(config, dtype=dtype)
        grass.compact(model, rank=rank, dim=dim, dtype=active_dtype)
        optimizer = grass.GrassAdamW(model)
        ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        _skip_frozen(tracker, model)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                loss = model(input_ids=ids, labels=ids).loss
                forward = _snapshot(tracker, "current")
                loss.backward()
                backward = _snapshot(tracker, "current")
                optimizer.step()
                optimizer.zero_grad()
        peak = _snapshot(tracker, "peak")
    return TrackedMemory(
        parameters=peak[_MemRefType.PARAM],
        gradients=backward[_MemRefType.GRAD],
        state=peak[_MemRefType.OPT],
        activations=forward[_MemRefType.ACT],
        peak=peak["Total"],
    )


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Scaled-dot-product attention as transformers runs it without padding; on fake tensors it would make a mask."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _skip_frozen(tracker: MemTracker, model: nn.Module) -> None:
    """Tell the tracker that frozen parameters have their gradient hooks: it would fail to register them."""
    for p in model.parameters():
        if not p.requires_grad:
            handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            tracker._param_to_grad_hook_handles[p] = handles


def _snapshot(tracker: MemTracker, kind: str) -> dict[Any, int]:
    (snapshot,) = tracker.get_tracker_snapshot(kind).values()
    return snapshot
