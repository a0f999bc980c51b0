"""Bytes that an optimizer holds, measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.state.schema import HOST_KEYS


class StateBytes(NamedTuple):
    """Bytes of optimizer state.

    Attributes:
        device: beside the weights; 0 with ``offload``. Per projected weight under :class:`grass.GrassAdamW` that is
            ``2rn`` moments and ``r`` int64 indices; ``keep`` and ``bank`` add ``r`` float32 step counts, drawing with
            replacement ``r`` float32 scales.
        host: in host memory: the moments bank, or with ``offload`` all state. Not the copies of weights and gradients
            that the host then has.
    """

    device: int
    host: int


def state_bytes(optimizer: torch.optim.Optimizer) -> StateBytes:
    """Bytes of all tensors in the state of any optimizer, also those inside containers, plain objects and subclasses.

    A tensor subclass that says what it is made of, as torchao's quantised states do, counts as its parts.
    """
    device = host = 0
    offload = getattr(optimizer, "offload", None)
    if offload is not None:
        offload.finish()  # the first step creates the state
    for state in optimizer.state.values():
        for key, value in state.items():
            size = sum(t.numel() * t.element_size() for t in _tensors(value))
            if offload is not None or key in HOST_KEYS:
                host += size
            else:
                device += size
    return StateBytes(device, host)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        parts = [] if flatten is None else [getattr(value, name) for name in flatten()[0]]  # a DTensor's mesh is one
        return [value] if flatten is None else [t for part in parts if isinstance(part, Tensor) for t in _tensors(part)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []
