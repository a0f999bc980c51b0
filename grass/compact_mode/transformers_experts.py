"""The forward of Hugging Face transformers' experts with active rows.

transformers lets a configuration name how experts compute (``experts_implementation``). :func:`use_active_rows`
registers ``"grass"`` there and names it in a configuration of the converted module's own; :func:`restore` gives it the
earlier one again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.experts import expert_product
from grass.private_names import apply_gate, experts_implementation, set_experts_implementation

IMPLEMENTATION = "grass"


def use_active_rows(module: nn.Module) -> None:
    """Let a module of transformers' experts compute with its active rows."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    earlier: Any = module.config
    if experts_implementation(earlier) != IMPLEMENTATION:
        config = copy.copy(earlier)  # the model's own stays, which other models may have been made from
        config._grass_earlier = earlier
        set_experts_implementation(config, IMPLEMENTATION)
        module.config = config


def restore(module: nn.Module) -> None:
    """Give a module its earlier configuration again."""
    module.config = vars(module.config).get("_grass_earlier", module.config)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' experts compute, by sorting tokens by expert.

    Args:
        self: the module of experts.
        hidden_states: ``(tokens, hidden)``.
        top_k_index: ``(tokens, k)``, the experts of each token. An index of ``num_experts`` or above, as expert
            parallelism has it, is an expert of another rank: it adds nothing here.
        top_k_weights: ``(tokens, k)``.

    Returns:
        ``(tokens, hidden)``.
    """
    count = top_k_index.shape[-1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    per_expert = experts.new_zeros(self.num_experts + 1)
    per_expert.index_add_(0, experts.clamp(max=self.num_experts), torch.ones_like(experts))
    ends = per_expert[: self.num_experts].cumsum(0)
    elsewhere = (experts >= self.num_experts).unsqueeze(1)
    experts = experts.clamp(max=self.num_experts - 1)
    x = hidden_states[order // count].masked_fill(elsewhere, 0.0)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    x = _linear(self, name, x, experts, ends)
    x = apply_gate(self, x) if self.has_gate else self.act_fn(x)
    x = _linear(self, "down_proj", x, experts, ends)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    x = (x * top_k_weights.reshape(-1)[order].unsqueeze(1)).masked_fill(elsewhere, 0.0)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
    return x[back].view(-1, count, x.shape[1]).sum(dim=1).to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """``W_e x + b_e`` for tokens sorted by expert."""
    y = expert_product(module, name, x, ends)
    bias = getattr(module, f"{name}_bias", None) if module.has_bias else None
    return y if bias is None else y + bias[experts].to(y.dtype)
