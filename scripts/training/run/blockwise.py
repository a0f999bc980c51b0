"""Making a model one decoder layer at a time, each converted before the next one exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grass.coverage import silent

Convert = Callable[[nn.Module, int], object]
"""``convert(layer, number)`` turns a decoder layer, in place, into what it is to be."""


def build_blockwise(config: PretrainedConfig, convert: Convert, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with random weights on the current default device, as ``from_config`` makes it.

    Parameters are made without memory first; layer after layer then gets its own, is initialised by the model's own
    rules, and converted. So at most one decoder layer exists unconverted, which is what int8 weights and FSDP2 need
    where not even one copy of the model in ``dtype`` fits. The same seed gives other values than ``from_config``.
    """
    device = torch.get_default_device()
    with init_empty_weights(include_buffers=False):  # buffers are computed, as those of rotary embeddings, not drawn
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    for number, layer in enumerate(model.base_model.layers):
        materialise(model, layer, device)
        with silent():
            convert(layer, number)
    materialise(model, model, device)
    model.tie_weights()
    made: PreTrainedModel = model
    return made


@torch.no_grad()
def materialise(model: Any, part: nn.Module, device: torch.device) -> None:
    """Give memory and initial values to the parameters of ``part`` that have none."""
    for module in part.modules():
        empty = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        for name, p in empty.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        if empty:
            model._init_weights(module)
