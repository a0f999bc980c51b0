"""What a run gets out of its device: model FLOPs utilisation and peak memory."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from torch import nn

PEAK_FLOPS = {
    "A100": 312e12,
    "A10G": 70e12,
    "H100": 989e12,
    "H200": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}
"""Dense half-precision FLOPs per second with float32 accumulation, by a part of the device's name; vendors' sheets."""


def model_flops_per_token(model: nn.Module, seq_len: int) -> float:
    """FLOPs of forward and full backward per token, ``6 N + 12 L T d`` (Chowdhery et al., 2022, appendix B).

    ``N`` are the weights of linear layers, the head's included and the embeddings' not; each of ``L`` layers attends
    over ``T`` tokens with queries of ``d = heads * head_dim`` numbers. The count is that of full-rank training
    whatever the method does: recomputation adds nothing to it, weight gradients that are never formed are in it.
    """
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * seq_len * config.num_attention_heads * head_dim
    return float(6 * linear + 12 * attention)


def peak_flops(device: torch.device) -> float | None:
    """The device's entry in :data:`PEAK_FLOPS`; ``None`` where its name matches none."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").replace("GeForce ", "")
    return next((flops for name, flops in PEAK_FLOPS.items() if f" {name} " in f" {words} "), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes that were allocated on a CUDA device at a time; elsewhere, that were resident for the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
