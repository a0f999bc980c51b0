"""``GrassMuon``: Muon for the active rows of compact mode and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Muon, Optimizer
from torch.optim.optimizer import ParamsT

from grass.compact_mode.attach import Attachment, attach_layers, attached_options
from grass.compact_mode.conversion import trainable_parameters
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import check_rows
from grass.compact_mode.registry import layers_of, take_flags
from grass.compact_mode.step_rates import factor_of
from grass.optimizer import GrassAdamW, NamedByModel
from grass.options import DEFAULTS, check_value, validate
from grass.state.schema import State
from grass.state_dict import report_replaced
from grass.validation import tensors_of

Group = dict[str, Any]

MUON = ("momentum", "nesterov")
"""Settings of groups that Muon trains, beside ``lr`` and ``weight_decay``."""

ADAMW = ("betas", "eps")
"""Settings of groups that AdamW trains, likewise."""

SELECTING = ("scale", "update_interval", "selection", "state_policy", "seed", "refresh", "sketch_size")
"""Settings that all groups of active rows share."""

SELECTION = "selection"
"""Key, in the saved state of active rows, of which rows they are and how long they have been selected."""


class GrassMuon(Optimizer):
    r"""Muon for the active rows of a converted model, and AdamW for its other parameters.

    ::

        grass.compact(model, rank=0.25)
        optimizer = grass.GrassMuon(model, lr=1e-3)

    Muon orthogonalises the update of a matrix: ``B <- momentum B + (1 - momentum) G`` and
    ``W <- W - lr 0.2 sqrt(max(m, n)) NS(B)``. Five Newton-Schulz iterations bring all singular values near 1, and the
    factor gives the update AdamW's root mean square, so that AdamW's learning rate fits (``torch.optim.Muon``,
    ``adjust_lr_fn="match_rms_adamw"``; Liu et al., 2025, arXiv 2502.16982). The matrix is that of the active rows or
    columns: a layer has one moment of these where AdamW has two. Explored ones move as under :func:`grass.attach`,
    which this class uses. Norms, biases, embeddings and output heads that are not converted are trained by
    :class:`grass.GrassAdamW` at full rank, which is AdamW.

    Each group that you give becomes one of active rows for each value of ``scale``, which may differ between layers,
    and one of the rest. ``param_groups`` has Muon's first; ``group["muon"]`` tells them apart. A group that you give
    ``muon=True`` may hold matrices that are not converted, which Muon then trains whole. Half-precision weights train
    better with ``grass.compact(model, ..., dtype=torch.float32)``: Muon rounds to the nearest value.

    ``state_dict()`` holds the selection too, and ``state`` shows it. Load it after the model's; training goes on bit
    for bit. Groups that a loop takes out of ``param_groups`` stand still, as under any optimizer of torch.

    Args:
        params: a model that :func:`grass.compact` converted, or parameters or groups of it.
        lr: AdamW's learning rate, of all groups without one of their own.
        betas: decay rates of AdamW's moments.
        eps: added to AdamW's denominator.
        weight_decay: decoupled decay rate of all groups without one of their own.
        momentum: decay rate of Muon's moment.
        nesterov: orthogonalise ``(1 - momentum) G + momentum B`` in place of ``B``.
        scale: multiplies the learning rate of active rows. ``"auto"`` is ``n / (r + q)``, as in
            :class:`grass.GrassAdamW`.
        update_interval: steps from one selection to the next.
        selection: one of :func:`grass.available_rules`, without replacement.
        state_policy: ``"keep"`` keeps the moment of rows that are selected again, ``"reset"`` zeroes all.
        seed: seed of the selection.
        refresh: ``"sketch"`` or ``"exact"``, as in :class:`grass.GrassAdamW`.
        sketch_size: columns of the sketch.

    Attributes:
        process_group: the ranks that train this model together; ``None`` means all there are.

    Raises:
        TypeError: a group has a setting that belongs to :class:`grass.GrassAdamW` alone, such as ``rank``.
        ValueError: a value is out of range, nothing is converted and no group has ``muon=True``, or active rows are
            those of experts.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: float | str = "auto",
        update_interval: int = 200,
        selection: str = "uniform",
        state_policy: str = "keep",
        seed: int = 0,
        refresh: str = "sketch",
        sketch_size: int = 32,
    ) -> None:
        _check_muon(momentum, nesterov)
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        options: dict[str, Any] = {
            "scale": scale,
            "update_interval": update_interval,
            "selection": selection,
            "state_policy": state_policy,
            "seed": seed,
            "refresh": refresh,
            "sketch_size": sketch_size,
        }
        validate({**common, "betas": betas, "eps": eps, "replacement": False, **options})
        groups = _groups(params)
        layers = layers_of(p for group in groups for p in tensors_of(group["params"]))
        take_flags(layers)
        frozen = {id(layer.own_weight()) for layer in layers}
        columns, others = _divided(groups, {id(layer.active): factor_of(layer, scale) for layer in layers}, frozen)
        if not columns:
            raise ValueError(
                "GrassMuon got no active rows: call grass.compact(model, rank=...) before building it, or give groups "
                "of matrices that Muon shall train whole muon=True"
            )
        columns = [{**group, **options} for group in columns]
        muon = Muon(columns, **common, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
        self._parts: list[Optimizer] = [muon]
        if others:
            self._parts.append(GrassAdamW(others, **common, betas=betas, eps=eps))
        self.attachment: Attachment | None = None
        """Which rows are selected, and for how long; ``None`` where nothing is converted."""
        if layers:
            self.attachment = attach_layers(muon, _named(layers), **options)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._show_groups()

    writes_back_active_rows = True
    """What :func:`grass.attach` looks for, which must not write them back too."""

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles, which would lack what joins both optimizers to the layers."""
        raise TypeError("GrassMuon cannot be copied or pickled: build a new one, and load state_dict() into it")

    def _show_groups(self) -> None:
        """Show the parts' groups as this optimizer's own."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def _follow_groups(self) -> None:
        """Give the parts the groups that a loop has left in ``param_groups``, or has put in their place.

        Raises:
            RuntimeError: a group has parameters that no part trains.
        """
        held = {id(p) for part in self._parts for group in part.param_groups for p in group["params"]}
        if any(id(p) not in held for group in self.param_groups for p in group["params"]):
            raise RuntimeError("param_groups has groups that were put there by hand: call add_param_group for them")
        for part, muon in zip(self._parts, (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group.get("muon", False) == muon]

    @property  # type: ignore[override]
    def state(self) -> _States:
        """The state of each parameter; that of active rows has the selection of their layer, too."""
        return _States(self._parts, self.attachment)

    @state.setter
    def state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Replace the state of all parameters."""
        shown = self.state
        shown.clear()
        for p, state in states.items():
            shown[p] = state

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that train the model together."""
        return None if self.attachment is None else self.attachment.process_group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        if self.attachment is not None:
            self.attachment.process_group = group
        for part in self._parts:
            if isinstance(part, GrassAdamW):
                part.process_group = group

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of other parameters than active rows.

        Raises:
            ValueError: it holds active rows, or is to be trained by Muon.
        """
        if any(param_group is group for part in self._parts for group in part.param_groups):
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        (group,) = _groups([param_group])
        columns, others = _divided([group], {id(layer.active): 1.0 for layer in layers_of(_tensors(group))}, set())
        held = {id(p) for own in self._parts[0].param_groups for p in own["params"]}
        if columns or not others or len(self._parts) == 1 or any(id(p) in held for p in _tensors(group)):
            raise ValueError(
                "Invalid group: it is empty, holds active rows or matrices that Muon trains, or is the first that "
                "AdamW would train. Build a new GrassMuon of all parameters"
            )
        self._follow_groups()
        self._parts[1].add_param_group(others[0])
        self._show_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimization step; ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        self._take_options()
        for part in self._parts:
            part.step()
        return loss

    def _take_options(self) -> None:
        """Go by the groups' settings, which a loop may have changed, and a loaded state."""
        for group in self._parts[0].param_groups:
            check_value("lr", group["lr"])
            check_value("weight_decay", group["weight_decay"])
            _check_muon(group["momentum"], group["nesterov"])
        if self.attachment is None:
            return
        every = [{name: group[name] for name in SELECTING} for group in self._parts[0].param_groups]
        options = every[0]
        if differing := [name for name in SELECTING if any(each[name] != options[name] for each in every)]:
            raise ValueError(f"Groups of active rows have different {differing[0]!r}: they share it")
        used = self.attachment.options
        if options != {name: getattr(used, name) for name in SELECTING}:
            self.attachment.use(attached_options(options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and sketches of active rows that an abandoned step has left."""
        self._follow_groups()
        for part in self._parts:
            part.zero_grad(set_to_none)
        if self.attachment is not None:
            for layer in self.attachment.layers.values():
                if isinstance(layer, CompactLayer):  # else grass.expand() has undone it, as the next step says
                    layer.clear_sketch()

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values, with the selection of each layer."""
        self._follow_groups()
        state: dict[int, dict[str, Any]] = {}
        groups: list[Group] = []
        for part in self._parts:
            first, saved = _count(groups), part.state_dict()
            state |= {first + key: value for key, value in saved["state"].items()}
            groups += [{**group, "params": [first + key for key in group["params"]]} for group in saved["param_groups"]]
        if self.attachment is not None:
            for key, selection in zip(self._numbers(), self.attachment.state_dict().values(), strict=True):
                state[key] = {**state.get(key, {}), SELECTION: selection}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; load the model first.

        Raises:
            ValueError: it is the state of another optimizer, or of other groups, layers or ranks.
        """
        self._follow_groups()
        parts = [_part(state_dict, muon) for muon in (True, False)][: len(self._parts)]
        found = [[len(group["params"]) for group in part["param_groups"]] for part in parts]
        held = [[len(group["params"]) for group in part.param_groups] for part in self._parts]
        saved = sum(len(group["params"]) for group in state_dict["param_groups"])
        if found != held or saved != _count(self.param_groups):
            raise ValueError(
                f"State of groups of {found} parameters that Muon and AdamW train, but this GrassMuon has {held}: load "
                "what GrassMuon.state_dict() gave for the same model and groups"
            )
        keys = [key for group in state_dict["param_groups"] if group.get("muon") for key in group["params"]]  # or names
        wanted = [keys[number] for number in self._numbers()]
        selections = [state_dict["state"].get(key, {}).get(SELECTION) for key in wanted]
        if missing := [key for key, selection in zip(wanted, selections, strict=True) if selection is None]:
            raise ValueError(f"The state has no selection of parameters {missing}: it is not GrassMuon's")
        layers = {} if self.attachment is None else self.attachment.layers
        for layer, selection in zip(layers.values(), selections, strict=True):
            check_rows(layer, selection)
        report_replaced(zip(self.param_groups, parts[0]["param_groups"], strict=False), (*SELECTING, "weight_decay"))
        for part, own in zip(self._parts, parts, strict=True):
            part.load_state_dict(own)
        self._take_options()
        if self.attachment is not None:
            self.attachment.load_state_dict(dict(zip(layers, selections, strict=True)))
        self._show_groups()

    def _numbers(self) -> list[int]:
        """Which of the parameters each converted layer's active rows are."""
        muon = self._parts[0].param_groups
        numbers = {id(p): number for number, p in enumerate(p for group in muon for p in group["params"])}
        layers = [] if self.attachment is None else self.attachment.layers.values()
        return [numbers[id(layer.active)] for layer in layers]


def _check_muon(momentum: float, nesterov: bool) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"Invalid {momentum=}: must be a number in [0, 1)")
    if not isinstance(nesterov, bool):
        raise TypeError(f"Invalid {nesterov=}: must be True or False")


class _States(MutableMapping[Tensor, Any]):
    """The states of the parts as one. Reading makes no empty state of what has none."""

    def __init__(self, parts: list[Optimizer], attachment: Attachment | None) -> None:
        self._parts, self._attachment = parts, attachment

    def __getitem__(self, key: Tensor) -> MutableMapping[str, Any]:
        state: dict[str, Any] = self._part_with(key).state[key]
        selection = self._selection(key)
        return state if selection is None else ChainMap(state, {SELECTION: selection})

    def _part_with(self, key: Tensor) -> Optimizer:
        for part in self._parts:
            if key in part.state:
                return part
        raise KeyError(key)

    def _selection(self, key: Tensor) -> State | None:
        """Which rows of a layer these are, and how long they have been selected."""
        if self._attachment is None:
            return None
        names = (name for name, layer in self._attachment.layers.items() if getattr(layer, "active", None) is key)
        return self._attachment.states[name] if (name := next(names, None)) is not None else None

    def __setitem__(self, key: Tensor, state: MutableMapping[str, Any]) -> None:
        holds = (part for part in self._parts if any(key is p for group in part.param_groups for p in group["params"]))
        if (part := next(holds, None)) is None:
            raise KeyError(f"No parameter of this GrassMuon: {key!r}")
        part.state[key] = {name: value for name, value in state.items() if name != SELECTION}

    def __delitem__(self, key: Tensor) -> None:
        del self._part_with(key).state[key]

    def __iter__(self) -> Iterator[Tensor]:
        return (key for part in self._parts for key in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def _groups(params: Any) -> list[Group]:
    """What an optimizer was given, as groups."""
    if isinstance(params, nn.Module):
        trained: list[Any] = trainable_parameters(params)
        named = NamedByModel(trained)
        named.model = weakref.ref(params)  # whose frozen parameters may be unfrozen later
        return [{"params": named}]
    if isinstance(params, Tensor):
        raise TypeError("GrassMuon takes a model, or an iterable of parameters or groups, got a tensor")
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    return [{**group, "params": _listed(group["params"])} for group in groups]


def _listed(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, NamedByModel) else list(params)


def _divided(groups: list[Group], factors: dict[int, float], frozen: set[int]) -> tuple[list[Group], list[Group]]:
    """The groups that Muon trains, and those that AdamW trains.

    Args:
        groups: those given.
        factors: what the learning rate of active rows is multiplied by, by ``id``: a group has those of one factor.
        frozen: weights to leave out, whose active rows train.
    """
    columns: list[Group] = []
    others: list[Group] = []
    for group in groups:
        if foreign := sorted(group.keys() & DEFAULTS.keys() - {"lr", "weight_decay", *ADAMW}):
            raise TypeError(
                f"A group of GrassMuon has no setting {foreign[0]!r}: must be one of "
                f"{', '.join(('params', 'lr', 'weight_decay', 'muon', *MUON, *ADAMW))}"
            )
        whole = 1.0 if group.get("muon") else None
        items = [item for item, p in zip(group["params"], _tensors(group), strict=True) if id(p) not in frozen]
        kinds = [factors.get(id(p), whole) for p in tensors_of(items)]
        for kind in dict.fromkeys(kinds):
            into, foreign_keys = (others, MUON) if kind is None else (columns, ADAMW)
            own = [item for item, other in zip(items, kinds, strict=True) if other == kind]
            kept = {key: value for key, value in group.items() if key not in foreign_keys}
            if isinstance(group["params"], NamedByModel):
                own, model = NamedByModel(own), group["params"].model
                own.model = model
            into.append({**kept, "params": own, "muon": kind is not None})
    return columns, others


def _tensors(group: Group) -> list[Tensor]:
    return tensors_of(group["params"])


def _named(layers: list[CompactLayer]) -> dict[str, CompactLayer]:
    """Layers by the labels that messages call them by; of two models' layers some may be alike."""
    times = Counter(layer.label for layer in layers)
    return {
        layer.label if times[layer.label] == 1 else f"{layer.label} ({number})": layer
        for number, layer in enumerate(layers)
    }


def _count(groups: list[Group]) -> int:
    return sum(len(group["params"]) for group in groups)


def _part(state_dict: dict[str, Any], muon: bool) -> dict[str, Any]:
    """The part of a saved state that Muon trains, or the rest, as one of its own."""
    groups = [group for group in state_dict["param_groups"] if group.get("muon", False) == muon]
    number = {key: number for number, key in enumerate(key for group in groups for key in group["params"])}
    state = {
        number[key]: {name: each for name, each in value.items() if name != SELECTION}
        for key, value in state_dict["state"].items()
        if key in number
    }
    return {
        "state": {key: value for key, value in state.items() if value},
        "param_groups": [{**group, "params": [number[key] for key in group["params"]]} for group in groups],
    }
