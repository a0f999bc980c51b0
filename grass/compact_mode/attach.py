"""Compact mode under any ``torch.optim`` optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.reads import Reads
from grass.compact_mode.refresh_cycle import Trained, adopt, advance, arm, check_rows, resume, take_over
from grass.compact_mode.registry import Owner, by_active_rows, layers_of, note_seeds
from grass.compact_mode.row_state import RowState, begin_variances, group_of, is_called
from grass.compact_mode.step_rates import StepRates, is_decoupled
from grass.coverage import report_decay
from grass.options import SPEED_KEYS, Options, as_number, settings_of, validate
from grass.parallel.agreement import Agreement
from grass.parallel.ranks import Ranks, checksum
from grass.parallel.shards import local
from grass.private_names import run_first
from grass.selection.exploration import explored_directions, turns
from grass.selection.projector import Projector
from grass.state.moments import source_rows
from grass.state.precision import rounding_key
from grass.state.refresh import Carry
from grass.state.schema import State

logger = logging.getLogger("grass")

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of the settings of any optimizer that are the same on all ranks."""


def attach(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    scale: float | str = 1.0,
    update_interval: int = 200,
    selection: str = "uniform",
    state_policy: str = "keep",
    seed: int = 0,
    refresh: str = "sketch",
    sketch_size: int = 32,
) -> Attachment:
    """Let any optimizer train the active rows of a converted model, its ``step()`` unchanged.

    A step post-hook writes the rows back after each step and chooses new ones every ``update_interval`` steps::

        grass.compact(model, rank=128)
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.requires_grad and p.ndim == 2])
        attachment = grass.attach(optimizer, model)

    State tensors with an entry for each active row, or in their shape, are zeroed at a refresh
    (``state_policy="reset"``), or kept for rows that are selected again (``"keep"``); Adagrad's begin with its
    ``initial_accumulator_value``. The optimizer's own step counts go on: Adam and its kin correct no bias of rows that
    are new, which move several times as far at first. :class:`grass.GrassAdamW` counts the steps of each row.
    Adafactor's second moment of a row that is new begins with the mean square of the row's gradient.

    Explored rows (:mod:`grass.selection.exploration`) do not move by the optimizer's rule. They move against their
    gradient (``maximize=True``: along it), as far as the optimizer moves selected rows. Its state for them is zeroed in
    each step. Decoupled weight decay, as AdamW's and Muon's, shrinks them by ``lr weight_decay (n - r) / q``, which on
    average is its strength for selected rows; decay that is part of the gradient does not reach them.

    A step that the optimizer skips because ``GradScaler`` found an overflow, as fused optimizers do inside ``step()``,
    does not count: all rows stay.

    Args:
        optimizer: any optimizer that holds active rows of ``model``, all or some.
        model: a model that :func:`grass.compact` converted.
        scale: multiplies the learning rate of active rows in each step. ``"auto"`` is ``n / (r + q)``, as in
            :class:`grass.GrassAdamW`, and suits rules that move values by about the learning rate, as AdamW's and
            Muon's. A group must not hold parameters that need different rates. Decoupled weight decay keeps its
            strength; groups show the rate that you gave them.
        update_interval: steps from one selection to the next.
        selection: one of :func:`grass.available_rules`, without replacement.
        state_policy: ``"reset"`` or ``"keep"``.
        seed: seed of the sampling rules.
        refresh: ``"sketch"`` or ``"exact"``, as in :class:`grass.GrassAdamW`.
        sketch_size: columns of the sketch.

    Returns:
        The attachment. Save its ``state_dict`` beside the optimizer's, and load it after the model's and the
        optimizer's.

    Raises:
        TypeError: accelerate has wrapped the optimizer.
        ValueError: a value is out of range, or the optimizer holds no active rows of the model, holds some of another
            model too, writes them back already, is ``Rprop``, or is ``Muon`` and holds those of experts; or ``scale``
            is not 1 for all parameters of a group.
    """
    if not isinstance(optimizer, Optimizer) or not isinstance(model, nn.Module):
        given = type(optimizer).__name__, type(model).__name__  # type: ignore[unreachable]
        raise TypeError(f"attach() takes an optimizer and a model, got {given[0]} and {given[1]}")
    if type(optimizer).__module__.startswith("accelerate."):
        raise TypeError("attach() takes an optimizer before accelerator.prepare() wraps it, or its .optimizer")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, CompactLayer) and id(layer.active) in held
    }
    return attach_layers(
        *(optimizer, layers),
        scale=scale,
        update_interval=update_interval,
        selection=selection,
        state_policy=state_policy,
        seed=seed,
        refresh=refresh,
        sketch_size=sketch_size,
    )


def attach_layers(optimizer: Optimizer, layers: dict[str, CompactLayer], **options: Any) -> Attachment:
    """:func:`attach`, to the layers whose active rows an optimizer holds, by name."""
    return Attachment(optimizer, layers, attached_options(options))


def attached_options(options: dict[str, Any]) -> Options:
    """The options of :func:`attach`, checked.

    Raises:
        TypeError, ValueError: another optimizer than :class:`grass.GrassAdamW` cannot have them.
    """
    options = {**options, "replacement": False}
    validate(options)
    if options["state_policy"] not in ("reset", "keep"):
        raise ValueError(
            f"Invalid state_policy={options['state_policy']!r}: must be 'reset' or 'keep' under another optimizer than "
            "GrassAdamW"
        )
    return Options.of(options)


class Attachment:
    """The result of :func:`attach`: the layers that an optimizer trains, and the age of each layer's selection.

    Attributes:
        process_group: the ranks that train the model together; ``None`` means all ranks.
    """

    process_group: ProcessGroup | None = None

    def __init__(self, optimizer: Optimizer, layers: dict[str, CompactLayer], options: Options) -> None:
        if getattr(optimizer, "writes_back_active_rows", False):
            raise ValueError(f"{type(optimizer).__name__} writes active rows back already")
        self.optimizer, self.options, self.layers = optimizer, options, layers
        if not self.layers:
            raise ValueError(
                f"{type(optimizer).__name__} holds no active rows of the model: call grass.compact() before building it"
            )
        _check_layers(optimizer, list(self.layers.values()))
        if by := next((layer.divided_by for layer in self.layers.values() if layer.divided_by), None):
            raise ValueError(f"attach() does not take layers that {by} divides: train them with GrassAdamW")
        self._rates = StepRates(optimizer, self.layers.values(), options.scale)
        self._row_state = RowState(optimizer)
        report_decay(optimizer.param_groups, {id(layer.active) for layer in self.layers.values()})
        self._report_coupled_decay(optimizer)
        self.states: dict[str, State] = {}
        for name, layer in self.layers.items():
            take_over(layer, options)
            self.states[name] = adopt(layer, {}, lambda *selections: None)
            arm(layer, self.states[name], options)
            layer.owner = Owner(optimizer)
        optimizer.writes_back_active_rows = True  # type: ignore[attr-defined]
        self._agreement = Agreement()
        self._before: dict[int, Tensor] = {}
        self._reads = Reads()
        self._count = _parameters_of(optimizer)
        before, after = (
            torch.compiler.disable(hook, reason="data decides the rows")  # type: ignore[no-untyped-call]
            for hook in (self._before_step, self._after_step)
        )
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        run_first(optimizer, self._hooks[1])

    def close(self) -> None:
        """Let the optimizer train without Grass again: undo :func:`attach`."""
        for hook in self._hooks:
            hook.remove()
        self._rates.end()
        for layer in self.layers.values():
            if layer.owner is not None and layer.owner.optimizer is self.optimizer:
                layer.owner = None
        del self.optimizer.writes_back_active_rows  # type: ignore[attr-defined]

    detach = close  # the earlier name, for one release

    def use(self, options: Options) -> None:
        """Go on with other options, from the next step on."""
        self._rates.end()
        self.options, self._rates = options, StepRates(self.optimizer, self.layers.values(), options.scale)

    def state_dict(self) -> dict[str, State]:
        """Selections and their ages by layer name, as tensors and plain numbers."""
        saved = {}
        for name, state in self.states.items():
            layer = self.layers[name]
            saved[name] = {**state, "active": layer.selected_part(layer.active.detach()).clone()}
            if not state["step"]:
                saved[name]["chosen"] = layer.chosen.clone()
        return saved

    def load_state_dict(self, state_dict: dict[str, State]) -> None:
        """Continue from :meth:`state_dict`."""
        if state_dict.keys() != self.layers.keys():
            raise ValueError(f"State for the layers {sorted(state_dict)}, but attached to {sorted(self.layers)}")
        for name, layer in self.layers.items():
            check_rows(layer, state_dict[name])
        for index, (name, layer) in enumerate(self.layers.items()):
            state = self.states[name] = dict(state_dict[name])
            resume(layer, state, state.pop("active"), self.options, index)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._check_added(optimizer)
        if any(not isinstance(layer, CompactLayer) for layer in self.layers.values()):
            raise RuntimeError(
                "grass.expand() has replaced the active rows that this optimizer was built for: build a new one for "
                "the parameters as they are now"
            )
        for layer in self.layers.values():
            Owner.check(layer, optimizer)
        self._reads.check()
        if not any(state["step"] for state in self.states.values()):
            self._report_lost_state()
            groups = [{**group, "seed": self.options.seed} for group in optimizer.param_groups]
            note_seeds(groups, by_active_rows(self.layers.values()), {})
        ranks = Ranks.of(self.process_group)
        self._agreement.check_joining(ranks, optimizer.param_groups)
        self._agreement.check(ranks, self._settings(), self._selected)
        for layer, _, position, *_ in self._trained():
            layer.prepare_step()
            if layer.reach:
                self._before[position] = layer.rows().clone()
        self._rates.begin()
        return self._begin_variances(optimizer, args, kwargs)

    def _begin_variances(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Let new rows begin with their gradient's second moment in Adafactor; the step's arguments, if they change.

        The gradient is there already, or the step's closure computes it.
        """
        if not is_called(optimizer, "Adafactor"):
            return None

        def begin() -> None:
            for layer in self.layers.values():
                begin_variances(optimizer.state.get(layer.active, {}), layer)

        own, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if closure is None:
            begin()
            return None

        def evaluate() -> Any:
            loss = closure()
            with torch.no_grad():
                begin()
            return loss

        return (own, evaluate, *others[1:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _check_added(self, optimizer: Optimizer) -> None:
        """Refuse active rows that the optimizer has got since, which would be neither written back nor refreshed."""
        if (count := _parameters_of(optimizer)) != self._count:
            held = layers_of(p for group in optimizer.param_groups for p in group["params"])
            if added := [layer.label for layer in held if all(layer is not own for own in self.layers.values())]:
                raise RuntimeError(
                    f"The optimizer has got active rows of {', '.join(map(repr, added))} since grass.attach(): call "
                    "attachment.close(), unfreeze layers by layer.requires_grad_(True), and call grass.attach() again"
                )
            self._count = count

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ranks, every = Ranks.of(self.process_group), self._trained()
        self._rates.end()
        if _skipped(optimizer):
            self._before.clear()
            for layer in self.layers.values():
                layer.clear_sketch()
            return
        stepped = {id(item.layer.active) for item in every if item.layer.active.grad is not None}
        self._reads.watch(self.layers.values(), stepped)
        for layer, state, position, *_ in every:
            state["step"] += 1
            self._row_state.check(layer)
            if position in self._before and layer.active.grad is not None:
                self._explore(layer, self._before.pop(position))
            if not layer.synced.late:
                layer.write_back(rounding_key(self.options, position, state["step"]))
        chosen = advance(every, self.options, ranks, self._carry_of)
        if chosen and isinstance(optimizer, torch.optim.LBFGS):
            optimizer.state.clear()  # curvature along rows that train no more
        ranks.verify_selection(chosen)

    def _report_coupled_decay(self, optimizer: Optimizer) -> None:
        """Warn of weight decay that is part of the gradient: explored rows move without it."""
        groups = [group_of(self.optimizer, layer) for layer in self.layers.values() if layer.reach]
        if any(group.get("weight_decay") and not is_decoupled(self.optimizer, group) for group in groups):
            logger.warning(
                "Grass: weight_decay of %s is part of the gradient and does not reach explored columns: choose an "
                "optimizer with decoupled decay, as AdamW, or convert with explore=0",
                type(optimizer).__name__,
            )

    def _report_lost_state(self) -> None:
        """Warn if the optimizer has state of rows, and the attachment has seen none of the steps that made it."""
        layers = [item.layer for item in self._trained()]
        held = ((self._row_state.empty(layer), self._row_state.tensors(layer)) for layer in layers)
        if any(bool((value != empty).any()) for empty, values in held for value in values):
            logger.warning(
                "Grass: %s has state of selected columns from steps that this attachment has not seen. If it was "
                "loaded, load what attachment.state_dict() gave too, which Trainer does not save: otherwise the state "
                "belongs to other columns",
                type(self.optimizer).__name__,
            )

    def _settings(self) -> dict[str, Any]:
        """What ranks must agree on: the options, and the plain values in the optimizer's groups."""
        settings = settings_of(vars(self.options)) | {"scale": self.options.scale}
        for number, group in enumerate(self.optimizer.param_groups):
            there = {key for key, value in group.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
            values = {key: as_number(group[key]) for key in sorted(group.keys() - {"params", *SPEED_KEYS, *there})}
            settings |= {f"{key} of group {number}": v for key, v in values.items() if isinstance(v, PLAIN)}
        return settings

    def _selected(self) -> dict[str, Any]:
        return {f"the rows of {name}": checksum(layer.chosen) for name, layer in self.layers.items()}

    def _trained(self) -> list[Trained]:
        """The layers whose groups a loop has not taken out of the optimizer."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [
            Trained(layer, self.states[name], index, layer.active.grad)
            for index, (name, layer) in enumerate(self.layers.items())
            if id(layer.active) in held
        ]

    def _ascends(self, layer: CompactLayer) -> bool:
        """Whether the optimizer moves the active rows along their gradient."""
        return bool(group_of(self.optimizer, layer).get("maximize", False))

    def _decay_of(self, layer: CompactLayer) -> float:
        """What the optimizer's decoupled weight decay takes off a weight in each step, as a fraction."""
        group = group_of(self.optimizer, layer)
        return float(group["lr"]) * float(group["weight_decay"]) if is_decoupled(self.optimizer, group) else 0.0

    def _explore(self, layer: CompactLayer, before: Tensor) -> None:
        """Replace the optimizer's move of explored rows by ours, and zero its state for them."""
        assert layer.active.grad is not None
        grad, rows, dim = layer.active.grad, layer.rows(), layer.dim
        update = layer.selected_part(before) - layer.selected_part(rows)
        reach = -layer.reach if self._ascends(layer) else layer.reach
        parts = update, layer.selected_part(local(grad)), layer.explored_part(grad)
        moves = []
        for own_update, selected, explored in zip(*(t.chunk(layer.experts, dim) for t in parts), strict=True):
            unit, lengths = explored_directions(own_update, selected, local(explored), dim, explored)
            moves.append(unit * lengths.unsqueeze(1 - dim) * reach)
        explored = layer.explored_part(before)
        factor = max(0.0, 1 - self._decay_of(layer) * turns(layer.shape[dim], *layer.counts()))
        layer.explored_part(rows).copy_(factor * explored - torch.cat(moves, dim))
        empty = self._row_state.empty(layer)
        for value in self._row_state.tensors(layer):
            layer.explored_part(value).fill_(empty)

    def _carry_of(self, item: Trained) -> Carry:
        """The state policy, applied to the optimizer's own state."""
        layer = item.layer

        def carry(old: Projector | None, new: Projector, resting: Tensor | None = None) -> None:
            among, empty = resting if self.options.state_policy == "reset" else None, self._row_state.empty(layer)
            for value in self._row_state.tensors(layer):
                selected = layer.selected_part(value)
                if old is None or (among is None and self.options.state_policy == "reset"):
                    selected.fill_(empty)
                else:
                    kept, source = source_rows(old, new, layer.shape[new.dim])
                    kept = kept if among is None else kept & among
                    rows = Projector(source, None, new.dim).gather(selected)
                    # in place: compiled steps hold the tensor
                    selected.copy_(torch.where(new.along(kept), rows, empty))

        return carry


def _skipped(optimizer: Optimizer) -> bool:
    """Whether ``GradScaler`` has told the optimizer, which then stepped nothing, that a gradient overflowed."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _parameters_of(optimizer: Optimizer) -> int:
    """How many parameters an optimizer holds."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _check_layers(optimizer: Optimizer, layers: list[CompactLayer]) -> None:
    """Refuse layers that the optimizer cannot train, and layers that the attachment does not know."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(layer.dim == 1 or layer.reach for layer in layers):
        raise ValueError(
            "LBFGS flattens gradients by view(), which those of columns do not allow: convert with dim=0, and with "
            "explore=0, because LBFGS moves all rows that it holds"
        )
    if isinstance(optimizer, torch.optim.Muon) and (experts := [layer.label for layer in layers if layer.experts > 1]):
        raise ValueError(
            f"Muon would orthogonalise the experts of {', '.join(map(repr, experts))} as one matrix: give it the "
            "active rows of linear layers only, or train experts with GrassAdamW"
        )
    if isinstance(optimizer, torch.optim.Rprop):
        raise ValueError(
            "attach() does not take Rprop: its state has the length of each value's step. That of new rows is zeroed, "
            "and they would not move"
        )
    if len(layers_of(p for g in optimizer.param_groups for p in g["params"])) != len(layers):
        raise ValueError(f"{type(optimizer).__name__} holds active rows of layers outside of the model too")
