"""What :class:`grass.GrassAdamW` checks before a step: settings, parameters, gradients, agreement of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import Layers
from grass.options import (
    ROW_KEYS,
    check_value,
    declared_settings,
    is_projected,
    parameter_names,
    shared_settings,
    validate,
)
from grass.parallel.agreement import Agreement
from grass.parallel.ranks import Ranks, checksum
from grass.parallel.shards import is_sharded
from grass.state.schema import State
from grass.validation import check_changed, validate_group

Groups = list[dict[str, Any]]

SCHEDULED = {"betas", "weight_decay"}
"""Settings that a schedule may change in every step; no tensor needs a look for them."""


class StepChecks:
    """Compares the groups of an optimizer with what they were at the last step."""

    def __init__(self, groups: Groups) -> None:
        self._settings = [(group, declared_settings(group)) for group in groups]
        self._by_rows: dict[int, bool] | None = None
        self._shapes = _shapes(groups)
        self._agreement = Agreement()

    @property
    def groups(self) -> int:
        """How many groups were added."""
        return len(self._settings)

    def add_last(self, groups: Groups, layers: Layers) -> None:
        """Take note of the last group, which was added and checked."""
        self._by_rows = _trained_by_rows(groups, layers)
        self._shapes |= _shapes(groups[-1:])
        self._settings.append((groups[-1], declared_settings(groups[-1])))

    def before_step(
        self, groups: Groups, states: Mapping[Tensor, State], layers: Layers, ranks: Ranks, others: Mapping[str, Any]
    ) -> None:
        """All checks that need no gradient. The ranks are compared first: an error of one is then one of all.

        Raises:
            TypeError: a setting was changed to a value of the wrong type.
            ValueError: a setting is out of range, must not change any more, or differs between the ranks.
            RuntimeError: something has replaced parameters since they were added, or ``DDP.join()`` is active.
        """
        self._follow(groups)
        self._agreement.check_joining(ranks, groups)
        self.check_ranks(groups, states, layers, ranks, others)
        self._check_settings(groups, states, layers)
        self._check_parameters(groups, layers)

    def _follow(self, groups: Groups) -> None:
        """Follow a list of groups that some were taken out of, as a loop may do with any optimizer of torch."""
        if len(groups) < len(self._settings):
            kept = {id(group) for group in groups}
            self._settings = [item for item in self._settings if id(item[0]) in kept]
        if len(groups) != len(self._settings):
            raise RuntimeError("param_groups has groups that were put there by hand: call add_param_group for them")
        self._settings = [(group, settings) for group, (_, settings) in zip(groups, self._settings, strict=True)]

    def _check_settings(self, groups: Groups, states: Mapping[Tensor, State], layers: Layers) -> None:
        """Check groups whose settings were changed by hand since the last step."""
        for number, (group, before) in enumerate(self._settings):
            if not isinstance(group["lr"], Tensor):  # of a tensor the value may be on a device
                check_value("lr", group["lr"])
            if (settings := declared_settings(group)) == before:
                continue
            changed = {key for key, value in settings.items() if value != before[key]}
            if not changed.isdisjoint(ROW_KEYS):
                check_changed(group, before, any(states.get(p) for p in group["params"]))
                self._by_rows = None
            validate(group)
            if changed - SCHEDULED:
                validate_group(group, layers)
            self._settings[number] = group, settings

    def _check_parameters(self, groups: Groups, layers: Layers) -> None:
        """Refuse to train at full rank what was to be trained by rows."""
        found = _trained_by_rows(groups, layers)
        if self._by_rows is None:
            self._by_rows = found
        if len(found) < len(self._by_rows):
            self._by_rows = self._without_taken_out(groups, self._by_rows)
        if len(found) < len(self._by_rows):
            if any(self._by_rows.get(id(p)) and id(p) not in layers for group in groups for p in group["params"]):
                raise RuntimeError(
                    "grass.expand(), fully_shard or a move from the meta device has replaced the active rows that this "
                    "optimizer was built for: build a new one for the parameters as they are now"
                )
            raise RuntimeError(
                f"Of {len(self._by_rows)} parameters that rows are selected of, {len(found)} are left: a wrapper has "
                "replaced them by flattened ones (DeepSpeed ZeRO, FSDP1), or FSDP2 has not resharded them before the "
                "step; train with DDP or FSDP2 (fully_shard)"
            )

    def _without_taken_out(self, groups: Groups, by_rows: dict[int, bool]) -> dict[int, bool]:
        """What is left if parameters were taken out by hand; wrappers put others in their place, or change shapes."""
        now = _shapes(groups)
        if any(self._shapes.get(key) != shape for key, shape in now.items()):
            return by_rows
        return {key: value for key, value in by_rows.items() if key in now}

    def check_ranks(
        self, groups: Groups, states: Mapping[Tensor, State], layers: Layers, ranks: Ranks, others: Mapping[str, Any]
    ) -> None:
        """Compare with the other ranks what decides a step, in the first step also parameters and their state.

        Args:
            groups: the optimizer's.
            states: the optimizer's.
            layers: converted layers by the ``id`` of their active rows.
            ranks: that train the model together.
            others: settings of the optimizer beside those of its groups.

        Raises:
            ValueError: on every rank, naming a setting that differs and the ranks that have each value.
        """
        if ranks.group is None:
            return
        settings = dict(others)
        for number, group in enumerate(groups):
            settings |= {f"{key} of group {number}": value for key, value in shared_settings(group).items()}
        self._agreement.check(ranks, settings, lambda: _parameter_settings(groups, states, layers))


def _parameter_settings(groups: Groups, states: Mapping[Tensor, State], layers: Layers) -> dict[str, Any]:
    """Shape, age and selected rows of every parameter."""
    settings: dict[str, Any] = {}
    position = 0
    for group in groups:
        names, position = parameter_names(group, position), position + len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            settings[f"the shape of {name}"] = tuple(p.shape)
            settings[f"the age of {name}"] = [int(states.get(p, {}).get(key, 0)) for key in ("step", "refreshes")]
            if id(p) in layers and layers[id(p)].strata == 1:
                settings[f"the rows of {name}"] = checksum(layers[id(p)].chosen)
    return settings


def check_gradients(groups: Groups) -> None:
    """Refuse gradients that cannot be stepped, before any parameter is.

    Raises:
        TypeError: one is sparse.
        ValueError: a parameter is sharded and its moments are to have 8 bits.
    """
    for group in groups:
        if group["moment_dtype"] == "8bit" and any(map(is_sharded, group["params"])):
            raise ValueError(
                "moment_dtype='8bit' cannot be sharded, because its blocks of 256 values run over rows: take 'bfloat16'"
            )
        for p in group["params"]:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"GrassAdamW takes dense gradients, got {p.grad.layout} for a weight of {tuple(p.shape)}; "
                    "use sparse=False in the embedding or torch.optim.SparseAdam for it"
                )


def _shapes(groups: Groups) -> dict[int, torch.Size]:
    return {id(p): p.shape for group in groups for p in group["params"]}


def _trained_by_rows(groups: Groups, layers: Layers) -> dict[int, bool]:
    """The parameters trained by rows: ``True`` for active rows, ``False`` for whole weights, by ``id``."""
    return {
        id(p): id(p) in layers for group in groups for p in group["params"] if id(p) in layers or is_projected(p, group)
    }
