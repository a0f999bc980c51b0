"""Saving and loading the state of :class:`grass.GrassAdamW`, bit for bit.

``Optimizer.load_state_dict`` casts state to the dtype and device of its parameter. That would round row indices and
moments of bfloat16 weights, and bring the bank to the device. The state of projected weights, and of parameters with a
master, therefore bypasses it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer, Layers
from grass.compact_mode.refresh_cycle import check_rows, restart, resume, wait_again, waiting
from grass.options import LASTING_KEYS, Options, is_batch, is_projected, validate
from grass.parallel.ranks import Ranks
from grass.parallel.shards import is_sharded, local
from grass.state.bank import Share
from grass.state.bank_exchange import shares_bank
from grass.state.master import is_half, keeps_master
from grass.state.schema import HOST_KEYS, MOMENTS, State
from grass.state.sharding import assembled, assembled_bank
from grass.state.strata import Strata
from grass.stepping import step_device

logger = logging.getLogger("grass")


def completed(state_dict: dict[str, Any], optimizer: Optimizer, layers: Layers, ranks: Ranks) -> dict[str, Any]:
    """The state dict with sharded state as ``DTensor``, and active rows' values that the weights cannot hold."""
    for position, (p, group) in enumerate(_with_groups(optimizer)):
        state, layer = state_dict["state"].get(position, {}), layers.get(id(p))
        if layer is not None and not state and (state := waiting(layer)):
            state_dict["state"][position] = state
        if "indices" in state and (strata := _strata(p, group, layer)) is not None:
            state_dict["state"][position] = strata.saved_state(state)
            continue
        if "indices" in state and is_sharded(p):
            batch = layer is None and is_batch(p, group)
            state = state_dict["state"][position] = assembled(state, p, _matrix_shape(p, group, layers), batch=batch)
        elif "bank_steps" in state and ranks.group is not None and shares_bank(group):
            state = state_dict["state"][position] = assembled_bank(state, _matrix_shape(p, group, layers), ranks.group)
        if "active" in state:
            if id(p) not in layers:
                raise RuntimeError("The optimizer was copied without its model: copy.deepcopy((model, optimizer))")
            values = p.detach() if "chosen" in state else layers[id(p)].selected_part(p.detach())
            state_dict["state"][position] = {**state, "active": values.clone()}
    return state_dict


class Loading:
    """One ``load_state_dict``, with hooks that take exact state past torch's code and put it in place.

    Args:
        all_masters: the optimizer steps all half-precision parameters as masters, not only small ones.
    """

    def __init__(self, layers: Layers, ranks: Ranks, *, all_masters: bool = False) -> None:
        self.layers, self.ranks, self._all_masters = layers, ranks, all_masters
        self._exact: dict[int, State] = {}

    @contextmanager
    def through(self, optimizer: Optimizer) -> Iterator[None]:
        """Hook into ``optimizer.load_state_dict`` inside."""
        before = optimizer.register_load_state_dict_pre_hook(self._begin)
        after = optimizer.register_load_state_dict_post_hook(self._finish, prepend=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _begin(self, optimizer: Optimizer, loading: dict[str, Any]) -> dict[str, Any]:
        """Check a loaded state dict and take out of it what torch must not cast."""
        keys = [key for group in loading["param_groups"] for key in group["params"]]
        bare = self._take_exact(optimizer, loading, keys)
        for position, ((p, group), key) in enumerate(zip(_with_groups(optimizer), keys, strict=False)):
            layer, state = self.layers.get(id(p)), self._exact.get(position)
            selects = layer is not None or is_projected(p, group)
            fits = layer is not None if state and "chosen" in state else selects == bool(state and "indices" in state)
            if loading["state"].get(key) and not fits:
                raise ValueError(
                    f"State of parameter {key} of shape {tuple(p.shape)} is that of plain AdamW or of other rows: "
                    "optimizer state does not carry over between AdamW, dense and compact mode, nor to groups in "
                    "another order; build the groups as they were, or load only the model"
                )
            if layer and state:
                check_rows(layer, state)
        groups = [dict(group) for group in loading["param_groups"]]
        pairs = list(zip(optimizer.param_groups, groups, strict=False))
        for ours, theirs in pairs:
            theirs["shard_bank"] = ours["shard_bank"]  # of these processes, not of those that saved
            validate({**optimizer.defaults, **theirs})
        report_replaced([(ours, {**optimizer.defaults, **theirs}) for ours, theirs in pairs], LASTING_KEYS)
        return {**bare, "param_groups": groups}

    def _finish(self, optimizer: Optimizer) -> None:
        """Put the state that was taken out in place and bring converted layers to the saved rows."""
        for position, (p, group) in enumerate(_with_groups(optimizer)):
            if position in self._exact and "chosen" not in self._exact[position]:
                optimizer.state[p] = self._held_here(self._exact[position], p, group)
            elif "step" in optimizer.state.get(p, {}):  # a number where an old torch saved it
                step = torch.as_tensor(optimizer.state[p]["step"], dtype=torch.float32, device=step_device(p, group))
                optimizer.state[p]["step"] = step
        for position, (p, group) in enumerate(_with_groups(optimizer)):
            if (layer := self.layers.get(id(p))) is None:
                continue
            if state := optimizer.state.get(p):
                resume(layer, state, state.get("active"), Options.of(group), position)
            elif state := self._exact.get(position):
                optimizer.state.pop(p, None)  # there is none before the first step
                wait_again(layer, state, Options.of(group))
            else:
                restart(layer, Options.of(group))

    def _take_exact(self, optimizer: Optimizer, state_dict: dict[str, Any], keys: list[int]) -> dict[str, Any]:
        """The state dict, shallowly copied, without the state that torch would cast, which is kept by position.

        That is the state of projected weights and of parameters with a master. Masters of others are dropped.
        """
        bare = dict(state_dict["state"])
        for position, ((p, group), key) in enumerate(zip(_with_groups(optimizer), keys, strict=False)):
            if not (state := bare.get(key)):
                continue
            if not (has_master := self._has_master(p, group)):
                bare[key] = state = {k: v for k, v in state.items() if k != "master"}
            if "indices" in state or "chosen" in state or has_master:
                self._exact[position], bare[key] = state, {}
        return {**state_dict, "state": bare}

    def _has_master(self, p: Tensor, group: dict[str, Any]) -> bool:
        if id(p) in self.layers:
            return False
        return (self._all_masters and is_half(p.dtype)) or (keeps_master(p) and not is_projected(p, group))

    def _held_here(self, saved: State, p: Tensor, group: dict[str, Any]) -> State:
        """A copy of the part of a saved state that this process holds. At full rank it has been cut already."""
        if "indices" not in saved:
            plain: State = {
                key: value.clone() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
                for key, value in saved.items()
            }
            if keeps_master(p):  # large ones have a master with offload only, and may not fit on the device
                plain = {key: value.to(p.device) for key, value in plain.items()}
            return {**plain, "step": plain["step"].to(step_device(p, group), torch.float32)}
        layer = self.layers.get(id(p))
        if (strata := _strata(p, group, layer)) is not None:
            saved = strata.held_state(saved)
        state: State = {key: local(value) if isinstance(value, Tensor) else value for key, value in saved.items()}
        state["step"] = int(state["step"])
        if "bank_steps" in state and not is_sharded(p):
            ranks = self.ranks if shares_bank(group) else Ranks(None)
            share = Share.of(_matrix_shape(p, group, self.layers)[state["dim"]], ranks)
            for key in HOST_KEYS:
                state[key] = share.of_bank(state[key], 0 if key == "bank_steps" else state["dim"])
        if (
            layer is not None and "exp_avg_scale" not in state
        ):  # earlier builds saved columns in one piece; codes keep it
            state |= {key: state[key].contiguous() for key in MOMENTS if key in state}
        return {
            key: value.to("cpu" if key in HOST_KEYS else p.device, copy=True) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }


def report_replaced(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], keys: Sequence[str]) -> None:
    """Say which settings of groups the saved ones replace: torch loads hyperparameters, too."""
    changed = ((key, ours, theirs) for ours, theirs in pairs for key in keys if ours[key] != theirs[key])
    replaced = dict.fromkeys(f"{key}={ours[key]!r} by {theirs[key]!r}" for key, ours, theirs in changed)
    if replaced:
        logger.warning("Grass: load_state_dict replaces %s, as it was saved", ", ".join(replaced))


def _with_groups(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]


def _strata(p: Tensor, group: dict[str, Any], layer: CompactLayer | None) -> CompactLayer | Strata | None:
    """What knows how ranks divide the selected dimension of a weight; ``None``: they do not."""
    if layer is not None:
        return layer if layer.strata > 1 else None
    return Strata.of(p, Options.of(group).dim_of(p))


def _matrix_shape(p: Tensor, group: dict[str, Any], layers: Layers) -> tuple[int, ...]:
    """``(m, n)`` of the weight that a parameter is or, as active rows, is part of; of all experts side by side."""
    if id(p) in layers:
        return tuple(layers[id(p)].shape)
    return tuple(Options.of(group).matrix_of(torch.empty(p.shape, device="meta")).shape)
