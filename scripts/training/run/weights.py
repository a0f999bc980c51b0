"""Weights in safetensors files of bounded size, laid out as ``from_pretrained`` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD_BYTES = 2 * 10**9


def write_weights(weights: Mapping[str, Tensor], path: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors to the directory ``path``: one file, or several and an index of which holds what.

    One file's tensors at a time are copied to host memory, so that weights with other strides can be saved from a
    device too full for a second copy. A tensor that comes under two names is written under the first.
    """
    places = {(t.data_ptr(), t.shape): name for name, t in reversed(list(weights.items()))}
    kept = {name: t for name, t in weights.items() if places[t.data_ptr(), t.shape] == name}
    split = split_torch_state_dict_into_shards(kept, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file({name: kept[name].cpu().contiguous() for name in names}, path / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / INDEX).write_text(json.dumps(index, indent=2))


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory that :func:`write_weights` filled."""
    index = path / INDEX
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [WEIGHTS]
    return {name: tensor for file in files for name, tensor in load_file(path / file).items()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load what :func:`write_weights` wrote of ``model.state_dict()``, second names of shared tensors included.

    Raises:
        RuntimeError: a tensor is missing, too many, or of another shape.
    """
    own = model.state_dict()
    first = {(own[name].data_ptr(), own[name].shape): name for name in weights if name in own}
    shared = {name: first.get((t.data_ptr(), t.shape), name) for name, t in own.items()}
    model.load_state_dict({**weights, **{name: weights[held] for name, held in shared.items() if held in weights}})
