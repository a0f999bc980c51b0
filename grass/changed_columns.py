"""A finetuned model as a file of the columns that changed.

Compact mode with columns that are drawn once (``explore=0, update_interval=1_000_000``) changes ``r`` of ``n`` columns
of each weight. The file holds these and their indices, ``r / n`` of the model, like an adapter. Unlike an adapter it
costs nothing afterwards: loading writes the columns into the plain model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grass.extras import optional

FORMAT = {"format": "grass.changed_columns", "version": "1"}
"""The metadata of a file."""
WHOLE, ROWS, COLUMNS, VALUES, KEPT = "whole", "rows", "columns", "values", "kept"
"""What a tensor of the file is of a tensor of the model: itself, indices, the values at these, or some of the base's,
which did not change. ``"rows:NAME"``."""
KEPT_VALUES = 16
"""How many of the base's values a file has of each matrix, to tell another base by."""

logger = logging.getLogger("grass")


@torch.no_grad()
def save_columns(
    model: nn.Module | Mapping[str, Tensor], path: str | Path, base: Mapping[str, Tensor] | str | Path
) -> dict[str, float]:
    """Save what differs between a model and the one that its training began with.

    Of each matrix whole columns (or rows, where fewer changed) are saved, of every other tensor all of it, if anything
    changed. The comparison is exact, whatever method trained the model. Explored columns change nearly all columns, so
    train with ``explore=0`` where the file shall be small. A warning says if the file holds the whole model.

    Args:
        model: in compact mode or plain, or its whole state dict (of a sharded model).
        path: the file to write, in the format of safetensors.
        base: the model before training: a state dict, a ``.safetensors`` file, or a directory that ``save_pretrained``
            wrote. Of a file, one tensor after another is read.

    Returns:
        The share of its columns (or rows, or of the tensor) that is saved, for each tensor that changed.

    Raises:
        ValueError: ``base`` lacks a tensor of the model or has it in another shape; or a tensor is sharded.
        FileNotFoundError: ``base`` is no such file or directory.
        ImportError: ``safetensors`` is not installed.
    """
    safetensors = optional("safetensors.torch", "A file of changed columns")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    lookup = base if isinstance(base, Mapping) else _read(Path(base))
    saved: dict[str, Tensor] = {}
    shares: dict[str, float] = {}
    for name, tensor in _without_twins(state, lookup).items():
        _check(name, tensor, lookup)
        before = lookup[name].to(tensor.device, tensor.dtype)
        parts, share = _difference(tensor, before)
        saved |= {f"{part}:{name}": piece.contiguous().cpu() for part, piece in parts.items()}
        if parts:
            shares[name] = share
    safetensors.save_file(saved, str(path), metadata=FORMAT)
    matrices = [share for name, share in shares.items() if state[name].ndim == 2]
    if matrices and min(matrices) == 1:
        logger.warning(
            "Grass: all columns of every matrix that changed are others than the base's, so %s holds these whole: is "
            "that the base that training began with, and was explore=0?",
            path,
        )
    return shares


@torch.no_grad()
def load_columns(model: nn.Module, path: str | Path) -> list[str]:
    """Write the columns of a file of :func:`save_columns` into a model; the names of the tensors that were changed.

    The model is the one that training began with, in compact mode or plain. Nothing is written if anything does not
    fit. A warning names the tensors whose other columns are not those of the base that the file was made with.

    Raises:
        ValueError: the file is none of :func:`save_columns`, or does not fit the model; the message names the tensor.
        ImportError: ``safetensors`` is not installed.
    """
    safetensors = optional("safetensors", "A file of changed columns")
    state = model.state_dict()
    with safetensors.safe_open(str(path), framework="pt") as file:
        if (file.metadata() or {}).get("format") != FORMAT["format"]:
            raise ValueError(f"{path} is not a file of changed columns: grass.save_columns writes these")
        parts: dict[str, dict[str, Tensor]] = {}
        for key in file.keys():  # noqa: SIM118 (it is no mapping)
            part, _, name = key.partition(":")
            parts.setdefault(name, {})[part] = file.get_tensor(key)
    for name, saved in parts.items():
        _check_fits(name, saved, state)
    if others := [name for name, saved in parts.items() if not _is_of_base(state[name], saved)]:
        logger.warning(
            "Grass: %d tensors of the model are not those of the base that %s was made with, so its columns come among "
            "others than they were trained with: %s%s",
            len(others),
            path,
            ", ".join(others[:3]),
            ", ..." if len(others) > 3 else "",
        )
    for name, saved in parts.items():
        _write(state[name], saved)
    return list(parts)


def _difference(tensor: Tensor, before: Tensor) -> tuple[dict[str, Tensor], float]:
    """The parts to save, none if nothing changed, and their share of the tensor."""
    changed = tensor.ne(before) & ~(tensor.isnan() & before.isnan())
    if not changed.any():
        return {}, 0.0
    if tensor.ndim != 2:
        return {WHOLE: tensor}, 1.0
    rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
    shares = len(rows) / tensor.shape[0], len(columns) / tensor.shape[1]
    dim, indices = (0, rows) if shares[0] < shares[1] else (1, columns)
    if shares[dim] == 1:
        return {WHOLE: tensor}, 1.0
    parts = {COLUMNS if dim else ROWS: indices.to(torch.int32), VALUES: tensor.index_select(dim, indices)}
    return {**parts, KEPT: _kept(tensor, dim, indices)}, shares[dim]


def _kept(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Some values of a matrix in the middle one of the columns, or rows, that are not at ``indices``."""
    others = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    others[indices] = False
    unchanged = others.nonzero().flatten()
    line = tensor.select(dim, int(unchanged[len(unchanged) // 2]))
    return line[:: -(-len(line) // KEPT_VALUES)].clone()


def _is_of_base(target: Tensor, saved: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of the model has the values of the base that did not change, as exactly as its type can."""
    if KEPT not in saved:
        return True  # all of it is replaced
    expected, found = saved[KEPT].to(target.device), _kept(target, *_indices(saved, target.device))
    coarsest = max(torch.finfo(each.dtype).eps for each in (found, expected))
    return torch.allclose(found.float(), expected.float(), rtol=coarsest, atol=0.0, equal_nan=True)


def _without_twins(state: Mapping[str, Tensor], base: Mapping[str, Tensor] | _Files) -> dict[str, Tensor]:
    """The state with one name of each tied tensor: the first that the base has."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if name in base:
            first.setdefault(_place(tensor), name)
    return {name: t for name, t in state.items() if t.numel() == 0 or first.get(_place(t), name) == name}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _check(name: str, tensor: Tensor, base: Mapping[str, Tensor] | _Files) -> None:
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} is sharded: give save_columns the whole state dict, as get_model_state_dict gathers it"
        )
    if name not in base:
        raise ValueError(f"The base has no {name}: must be the model before training, and its weights not in 8 bits")
    if base[name].shape != tensor.shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)} in the model and {tuple(base[name].shape)} in the base")


def _check_fits(name: str, saved: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    if name not in state:
        raise ValueError(f"The file changes {name}, which the model does not have")
    target, values = state[name], saved.get(VALUES, saved.get(WHOLE))
    if values is None or (VALUES in saved) != (ROWS in saved or COLUMNS in saved):
        raise ValueError(f"The file has only {', '.join(saved)} of {name}: it is damaged")
    if isinstance(target, DTensor):
        raise ValueError(f"{name} is sharded: load the columns before the model is sharded")
    shape = list(target.shape)
    for dim, kind in enumerate((ROWS, COLUMNS)):
        if kind in saved and target.ndim == 2:
            if int(saved[kind].max()) >= shape[dim]:
                raise ValueError(
                    f"The file changes {kind[:-1]} {int(saved[kind].max())} of {name}, which has {shape[dim]}"
                )
            shape[dim] = len(saved[kind])
    if list(values.shape) != shape:
        raise ValueError(f"{name} is {tuple(target.shape)}, which {tuple(values.shape)} of the file do not fit")


def _indices(saved: Mapping[str, Tensor], device: torch.device) -> tuple[int, Tensor]:
    """The dimension along which some of a matrix is saved, and which of its rows or columns."""
    dim = 1 if COLUMNS in saved else 0
    return dim, saved[COLUMNS if dim else ROWS].to(device, torch.int64)


def _write(target: Tensor, saved: Mapping[str, Tensor]) -> None:
    if WHOLE in saved:
        target.copy_(saved[WHOLE])
        return
    dim, indices = _indices(saved, target.device)
    target.index_copy_(dim, indices, saved[VALUES].to(target.device, target.dtype))


class _Files:
    """The tensors of one or several safetensors files, read when they are asked for."""

    def __init__(self, paths: list[Path]) -> None:
        safetensors = optional("safetensors", "A file of changed columns")
        files = [safetensors.safe_open(str(path), framework="pt") for path in paths]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no mapping)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _read(path: Path) -> _Files:
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths or not all(file.is_file() for file in paths):
        raise FileNotFoundError(f"{path} is no safetensors file and no directory with any: save_pretrained writes one")
    return _Files(paths)
