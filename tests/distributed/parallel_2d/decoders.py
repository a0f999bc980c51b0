"""Small decoders of transformers, in one process and on a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from grass.distributed import parallelize_2d

VOCABULARY, BATCH, LENGTH = 24, 4, 6


def decoder(model_type: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The same weights in every process. Norms are torch's, which compute in float64 where transformers' do not."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
        **options,
    }
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=dtype))
    if dtype == torch.float64:
        _norm_in_float64(model)
    return model


def _norm_in_float64(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            eps = getattr(child, "variance_epsilon", None)
            if eps is not None:
                norm = nn.RMSNorm(child.weight.shape[0], eps=eps, dtype=torch.float64)
                norm.weight.data.copy_(child.weight)
                setattr(module, name, norm)


def ids(step: int, batch: int = BATCH) -> Tensor:
    """Token ids ``(b, s)``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)


def labels_of(tokens: Tensor) -> Tensor:
    """The tokens, of which some do not count; differently many in each part of the batch."""
    labels = tokens.clone()
    labels[0, 2:5] = -100
    return labels


def plain_loss(model: Any, tokens: Tensor) -> Tensor:
    """The loss in one process, in the precision of the logits."""
    logits, labels = model(input_ids=tokens).logits, labels_of(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mesh_of(*shape: int, device: str = "cpu") -> DeviceMesh:
    """A mesh of ranks, of which each has a device of this type."""
    return init_device_mesh(device, shape, mesh_dim_names=("replicas", "rows", "columns")[-len(shape) :])


def on_grid(model: Any, *shape: int, **options: Any) -> Any:
    """The model, spread over a grid of devices of its type."""
    device = next(model.parameters()).device.type
    parallelize_2d(model, mesh_of(*shape, device=device), **{"chunk_tokens": 5, **options})
    return model


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict of plain tensors."""
    return {name: _whole(value).detach().clone() for name, value in tensors.items()}


def _whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter."""
    return {name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
