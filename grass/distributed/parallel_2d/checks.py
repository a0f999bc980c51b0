"""What can be spread over a grid."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from grass.distributed.parallel_2d.mesh import Grid
from grass.labels import changes_logits

ARCHITECTURES = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "starcoder2")
"""``model_type`` of the decoders whose logits the tests compare. Others may split fused projections or norm whole
vectors in code of their own, which parts of features would silently pass through."""


class Norm(NamedTuple):
    """A normalisation.

    Attributes:
        size: features.
        eps: added to the mean square.
        centers: whether the mean is subtracted.
        squares_dtype: the precision it computes in; ``None`` for the input's, at least float32.
    """

    size: int
    eps: float
    centers: bool
    squares_dtype: torch.dtype | None


def head_size(config: Any) -> int:
    """Features of an attention head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def norm_kind(module: Any) -> Norm | None:
    """The normalisation that a module computes; ``None`` if it is none that a grid can compute."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or any(True for _ in module.children()):
        return None
    if type(module) is nn.LayerNorm:
        return Norm(len(weight), module.eps, True, None)
    if type(module) is nn.RMSNorm:
        own = torch.finfo(weight.dtype).eps if module.eps is None else module.eps
        return Norm(len(weight), own, False, None)
    eps = getattr(module, "variance_epsilon", None)
    if eps is None or not _computes_rms(module, weight, eps):
        return None
    return Norm(len(weight), eps, False, torch.float32)


def check_mesh(mesh: Any, panels: int, chunk_tokens: int, batch_size: int | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a mesh or numbers that :func:`parallelize_2d` does not take."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (2, 3) or not mesh.mesh_dim_names:
        raise ValueError(
            f"Invalid mesh of shape {tuple(mesh.shape)}: must have two named dimensions, rows and columns, or three, "
            "replicas before them"
        )
    rows, columns = mesh.shape[-2:]
    if rows < 2 or rows % columns:
        raise ValueError(
            f"Invalid mesh of {rows} x {columns}: must have two rows or more, a multiple of the number of columns"
        )
    for name, value in (("panels", panels), ("chunk_tokens", chunk_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Invalid {name}={value!r}: must be a positive integer")
    if batch_size is not None and batch_size % rows:
        raise ValueError(f"Invalid {batch_size=}: must be a multiple of the {rows} rows of ranks")


def check_model(model: Any, grid: Grid) -> None:
    """Check that a model is a decoder whose sizes the grid divides.

    Raises:
        TypeError: it is not.
        ValueError: a size is not divided.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model") or model.get_output_embeddings() is None:
        raise TypeError(f"{type(model).__name__} is no language model of transformers with a head")
    if config.model_type not in ARCHITECTURES:
        raise TypeError(f"A grid computes decoders of the types {', '.join(ARCHITECTURES)}, not {config.model_type}")
    if any(hasattr(p, "to_local") for p in model.parameters()):
        raise TypeError("The parameters are DTensors already: call parallelize_2d before fully_shard, and once")
    if not all(p.requires_grad for p in model.parameters()):
        raise TypeError("Some parameters are frozen: call parallelize_2d before grass.compact")
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise TypeError("The head is tied to the embedding: build the model with tie_word_embeddings=False")
    if (name := changes_logits(config)) is not None:
        raise TypeError(f"{type(model).__name__} changes its logits ({name}): not for a grid")
    if not type(model).forward.__module__.startswith("transformers."):
        raise TypeError(f"{type(model).__name__} has a forward of its own: a grid computes that of transformers")
    _check_config(config)
    for name, module in model.named_modules():
        _check_layer(name, module)
    _check_sizes(model, config, grid)


def _check_config(config: Any) -> None:
    """Raise ``ValueError`` for what ranks cannot compute from parts."""
    for name, value in config.to_dict().items():
        if name.endswith("dropout") and value:
            raise ValueError(f"{name}={value}: ranks would drop the same places of different parts; set it to 0")
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
        raise ValueError(f"Rotary embeddings of type {kind!r} depend on the whole batch: not for a grid")
    if head_size(config) == config.hidden_size:
        raise ValueError("One head of the hidden size: not for a grid")


def _check_layer(name: str, module: Any) -> None:
    """Raise ``TypeError`` for a layer with parameters that a grid cannot compute."""
    if not module._parameters or all(p is None for p in module._parameters.values()):
        return
    if type(module) not in (nn.Linear, nn.Embedding) and norm_kind(module) is None:
        raise TypeError(
            f"{name} is a {type(module).__name__}: a grid has linear layers, embeddings, LayerNorm, RMSNorm"
        )
    if type(module) is nn.Embedding and module.max_norm is not None:
        raise TypeError(f"{name} has max_norm: not for a grid")


def _check_sizes(model: nn.Module, config: Any, grid: Grid) -> None:
    rows, columns = grid.rows, grid.columns
    sizes = [
        ("attention heads", config.num_attention_heads, columns),
        ("key and value heads", getattr(config, "num_key_value_heads", None) or config.num_attention_heads, columns),
        ("vocabulary", config.vocab_size, rows),
        ("hidden size", config.hidden_size, rows * grid.panels),
    ]
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            sizes.append((f"input features of {name}", module.in_features, rows * grid.panels))
            sizes.append((f"output features of {name}", module.out_features, columns))
        elif (kind := norm_kind(module)) is not None and kind.size != head_size(config):
            sizes.append((f"features of {name}", kind.size, columns))
    for what, size, by in sizes:
        if size % by:
            pieces = f" x {grid.panels} panels" if by not in (rows, columns) else ""
            raise ValueError(f"{what}: {size} cannot be divided by {by} (a mesh of {rows} x {columns}{pieces})")


@torch.no_grad()
def _computes_rms(module: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether a module's output is ``w x / sqrt(mean(x^2) + eps)``, tried on random values."""
    if weight.is_meta:
        return True
    x = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
    expected = weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    try:
        return torch.allclose(module(x), expected, rtol=1e-2, atol=1e-3)
    except (TypeError, RuntimeError):
        return False
