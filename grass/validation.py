"""Checks of a parameter group against its tensors and converted layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import check_sharding
from grass.compact_mode.strata import sharers
from grass.options import Options, explored_count, is_batch, is_projected, resolve_dim, resolve_rank, share, validate
from grass.parallel.shards import check_shards, is_wrapper
from grass.selection.exploration import resolve_explore
from grass.state.strata import Strata

logger = logging.getLogger("grass")


def validate_group(group: dict[str, Any], layers: dict[int, CompactLayer]) -> None:
    """Check a group's values, and its ``rank`` against each of its tensors.

    Args:
        group: the group.
        layers: converted layers by the ``id`` of their active rows.

    Raises:
        TypeError: a tensor is complex, or a value of the wrong type.
        ValueError: a value is out of range; the message names value and range.
    """
    validate(group)
    if group["stochastic_rounding"] and group["replacement"]:
        raise ValueError(
            "stochastic_rounding=True takes replacement=False: rows that repeat are added up in the weight's precision"
        )
    if group["explore"] and group["replacement"]:
        raise ValueError(f"explore={group['explore']!r} takes replacement=False: scaled rows have no complement")
    if group["fused"] and group["foreach"]:
        raise ValueError("`fused` and `foreach` cannot be `True` together: got fused=True, foreach=True")
    for name, usual in (("shard_bank", False), ("bank_dtype", "float32")):
        if group[name] != usual and group["state_policy"] != "bank":
            raise ValueError(f"{name}={group[name]!r} takes state_policy='bank', got {group['state_policy']!r}")
    for tensor in tensors_of(group["params"]):
        if id(tensor) in layers:
            _check_active(layers[id(tensor)], group)
        else:
            _check_tensor(tensor, group)


def check_changed(group: dict[str, Any], before: dict[str, Any], has_state: bool) -> None:
    """Check the settings of a group after the user has changed some of them.

    Args:
        group: the group as it is.
        before: its settings when they were last checked.
        has_state: whether one of its parameters has been stepped.

    Raises:
        ValueError: ``rank`` or ``dim`` of a group with state was changed.
    """
    for key in ("rank", "dim"):
        if has_state and group[key] != before[key]:
            raise ValueError(
                f"Invalid {key}={group[key]!r}: must stay {before[key]!r} because this group has state of that {key}; "
                "build a new optimizer to train with another"
            )


def report_default_rank(defaults: dict[str, Any], params: Any) -> None:
    """Say that an optimizer's rank holds for all matrices of a group without a rank of its own.

    Tensors do not tell whether they are embeddings or output heads, which train better at full rank.
    """
    matrices = sum(is_projected(tensor, defaults) for tensor in tensors_of(params))
    if matrices > 1:
        logger.warning(
            "Grass: rank=%s holds for all %d matrices given, embeddings and output heads too if they are among them; "
            "grass.param_groups(model, rank=%s) leaves these at full rank",
            *(defaults["rank"], matrices, defaults["rank"]),
        )


def tensors_of(params: Any) -> list[Tensor]:
    """The tensors of a group. Other items are left out; torch's own check refuses them."""
    items = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
    return [p for p in items if isinstance(p, Tensor)]


def _check_tensor(tensor: Tensor, group: dict[str, Any]) -> None:
    if tensor.is_complex():
        raise TypeError(f"GrassAdamW takes real tensors, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not is_projected(tensor, group):
        return
    if is_wrapper(tensor):
        raise TypeError(
            f"GrassAdamW selects rows of plain tensors, got a {type(tensor).__name__} of shape {tuple(tensor.shape)}; "
            "put it into a group with rank=None"
        )
    if batch := is_batch(tensor, group):
        _check_experts(group)
    matrix = torch.empty(tensor.shape[1:] if batch else tensor.shape, device="meta").flatten(1)
    dim = resolve_dim(group["dim"], matrix.shape)
    strata = Strata.of(tensor, dim)
    if strata is None:
        check_shards(tensor, dim + batch, "A weight", batch=batch)
    else:
        _check_strata(strata, group)
    size = matrix.shape[dim]
    rank = resolve_rank(group["rank"], size)
    if rank > size:
        raise ValueError(
            f"Invalid rank={rank}: must be at most {size}, the selected dimension of the weight of shape "
            f"{tuple(tensor.shape)}; lower it, give it as a fraction, or put this weight into a group with rank=None"
        )
    if rank + (explored := explored_count(group, rank, size)) > size:
        raise ValueError(
            f"Invalid explore={explored}: must be at most {size - rank}, the rows of the weight of shape "
            f"{tuple(tensor.shape)} that are not selected, or a fraction, which is cut to that"
        )


def check_offloaded(group: dict[str, Any], layers: Iterable[CompactLayer]) -> None:
    """Raise ``ValueError`` if a group has weights of which ranks have strata: these cannot be stepped on the host."""
    if by := next((layer.divided_by for layer in layers if layer.divided_by), None):
        raise ValueError(f"offload does not take layers that {by} divides")
    options = Options.of(group)
    for tensor in tensors_of(group["params"]):
        if options.projects(tensor) and Strata.of(tensor, options.dim_of(tensor)) is not None:
            raise ValueError(
                "offload does not take weights that ranks divide along the selected dimension, as one of shape "
                f"{tuple(tensor.shape)}"
            )


def _check_strata(strata: Strata, group: dict[str, Any]) -> None:
    """Refuse what is not there for weights that ranks divide along the selected dimension."""
    for name in ("rank", "explore"):
        share(name, group[name], strata.count)
    if group["replacement"]:
        raise ValueError(
            "replacement=True does not take weights that ranks divide along the selected dimension: take False"
        )


def _check_active(layer: CompactLayer, group: dict[str, Any]) -> None:
    check_sharding(layer)
    if layer.is_batch:
        _check_experts(group)
    if group["dim"] == 0 and layer.dim == 1:  # the other way round, the group may have the default
        raise ValueError(
            f"Invalid dim=0: {layer.label!r} was converted with dim={layer.dim}, which decides; convert with dim=0, or "
            "leave dim out"
        )
    size = layer.shape[layer.dim] // layer.experts
    selected, count = (rows // layer.experts for rows in layer.counts())
    if group["replacement"]:
        raise ValueError("Compact mode takes replacement=False: active rows are neither scaled nor repeated")
    rank, explore = (share(name, group[name], sharers(layer, layer.strata)) for name in ("rank", "explore"))
    if rank is not None and resolve_rank(rank, size) != selected:
        raise ValueError(
            f"Invalid {rank=}: must be None or {selected}, which grass.compact() gave the layers already; "
            "to train more or fewer rows, convert with another rank"
        )
    if explore is not None and resolve_explore(explore, selected, size) != count:
        raise ValueError(
            f"Invalid {explore=}: must be None or {count}, which grass.compact() gave the layers already; "
            "to explore more or fewer rows, convert with another explore"
        )


def _check_experts(group: dict[str, Any]) -> None:
    """Refuse what is not there for experts, whose state is stepped expert by expert."""
    if group["moment_dtype"] == "8bit":
        raise ValueError("moment_dtype='8bit' does not take experts: its blocks of 256 values run over them")
    if group["replacement"]:
        raise ValueError("replacement=True does not take experts")
    if group["decay"] == "all":
        raise ValueError("decay='all' does not take experts: those without tokens stay as they are")
