"""Which optimizer trains a converted layer: there must be one, which finds its layers by their parameters.

``GrassAdamW(model.parameters())`` gets tensors, not layers. A tensor cannot lead to its layer: FSDP2, ``deepcopy``,
``to_empty`` and unpickling replace ``layer.active`` by a new parameter without its attributes, so only the layer knows
its parameter. Layers therefore register themselves in ``LAYERS``, weakly: dropped models are not kept alive.

The registry is searched only

- when an optimizer gets a parameter group, and once after it was copied, unpickled or loaded (:func:`layers_of`);
- at the first step of any ``torch.optim`` optimizer, and at its first step after more layers were converted or copied
  (:func:`check_optimizer`).

Optimizers keep what they found. Every other step compares a few integers, whatever other models are alive.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from grass.compact_mode.layer import LAYERS, CompactLayer, Layers
from grass.every_optimizer import before_every_step
from grass.parallel.ddp import are_wrapped
from grass.state.schema import State

logger = logging.getLogger("grass")

_CHECKED: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""What each optimizer looked like when it was last checked."""


ZERO = (
    "ZeroRedundancyOptimizer does not take compact mode: it gives each rank the optimizer of some layers, but every "
    "rank has to select rows of all layers and write them back. Under DDP pass grass.GrassAdamW itself, with "
    "shard_bank=True to divide a bank, or shard the model by FSDP2 (fully_shard)"
)


def layers_of(parameters: Iterable[Tensor]) -> list[CompactLayer]:
    """The converted layers whose active rows are among these parameters, found among all layers alive.

    Hold on to the result: the search takes time in proportion to all layers alive, and the layers know their
    parameters also after a wrapper has replaced these.
    """
    alive = {id(layer._parameters.get("active")): layer for layer in LAYERS}
    return [alive[id(p)] for p in parameters if id(p) in alive]


def by_active_rows(layers: Iterable[CompactLayer]) -> dict[int, CompactLayer]:
    """Layers by the current ``id`` of their active rows: wrappers may replace parameters between two steps."""
    rows = ((layer._parameters.get("active"), layer) for layer in layers)  # past __getattr__, which is slow
    return {id(active): layer for active, layer in rows if active is not None}


def _owner(layer: CompactLayer) -> Optimizer | None:
    """The optimizer that trains a layer, if it is alive."""
    return None if layer.owner is None else layer.owner.optimizer


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would leave converted layers untrained; called before every step of every optimizer.

    Layers with gradients that no optimizer has are named in a warning, once for each optimizer.

    Raises:
        RuntimeError: it was built before the conversion, it trains active rows that nothing writes back, or it is
            torch's ``ZeroRedundancyOptimizer``.
    """
    if not LAYERS:
        return
    is_marked = getattr(optimizer, "writes_back_active_rows", False)
    version = is_marked, LAYERS.additions, *(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == version:
        return
    writing = {id(each) for each in wrapped(optimizer) if getattr(each, "writes_back_active_rows", False)}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    is_zero = "ZeroRedundancyOptimizer" in (kind.__name__ for kind in type(optimizer).__mro__)
    for layer in LAYERS:
        active, weight = layer._parameters.get("active"), layer._parameters.get("weight")  # past slow __getattr__
        if id(active) not in held and id(weight) in held:
            raise RuntimeError(
                f"This optimizer holds the frozen weight of {layer.label!r} and not the layer's active rows, which "
                "train: it was built before grass.compact(), or from parameters chosen by the ending 'weight' of "
                "their names. Build it after the conversion, from parameters with requires_grad"
            )
        if id(active) in held and is_zero:
            raise RuntimeError(ZERO)
        if id(active) in held and id(optimizer) not in writing and id(_owner(layer)) not in writing:
            raise RuntimeError(
                f"{type(optimizer).__name__} would train active rows that never reach the model's weights: use "
                "grass.GrassAdamW, or call grass.attach(optimizer, model) once after building this one"
            )
    if optimizer not in _CHECKED:
        _report_unheld(held)
    _CHECKED[optimizer] = version


def _report_unheld(held: Collection[int]) -> None:
    """Warn of active rows that have a gradient, are not in the optimizer that steps, and never were in one of ours."""
    missing = []
    for layer in LAYERS:
        active = layer._parameters.get("active")
        if active is not None and active.grad is not None and layer.owner is None and id(active) not in held:
            missing.append(repr(layer.label))
    if missing:
        logger.warning(
            "Grass: the active rows of %d layers have gradients, are in no optimizer and do not train: %s. Build the "
            "optimizer from all parameters with requires_grad: active rows are not found by the ending 'weight' of "
            "their names. If gradients are handed on to another model, that one may have selected other columns",
            len(missing),
            ", ".join(sorted(missing)),
        )


def _watch_optimizers() -> None:
    """Check every optimizer of this process from now on, because a layer was converted, copied or unpickled."""
    before_every_step(check_optimizer)


LAYERS.on_add = _watch_optimizers


class Owner:
    """A weak reference to the optimizer that trains a layer's active rows; empty in a copied or unpickled layer."""

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[type[Owner], tuple[()]]:
        return Owner, ()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; ``None`` if there is none or it was deleted."""
        return None if self._optimizer is None else self._optimizer()

    @staticmethod
    def check(layer: CompactLayer, optimizer: Optimizer) -> None:
        """Make ``optimizer`` the owner of a layer without one.

        Raises:
            RuntimeError: another optimizer was built on these active rows later.
        """
        owner = layer.owner.optimizer if layer.owner is not None else None
        if owner is None:
            layer.owner = Owner(optimizer)
        elif owner is not optimizer:
            raise RuntimeError(
                f"The active rows of {layer.label!r} belong to a {type(owner).__name__} that was built later: two "
                "optimizers would choose rows for one layer. Build one, and delete it before you build another"
            )


def take_flags(layers: Iterable[CompactLayer]) -> None:
    """Unfreeze the active rows of layers whose weights were unfrozen by their names, and freeze the weights.

    Raises:
        RuntimeError: DDP was built between: it waits for gradients of the weights, or sends zeros in their place.
    """
    layers = list(layers)
    unfrozen = [layer for layer in layers if layer.own_weight().requires_grad]
    if are_wrapped([layer.own_weight() for layer in unfrozen]):
        raise RuntimeError(
            f"DistributedDataParallel was built while weights of converted layers, as {unfrozen[0].label!r}, took "
            "gradients, and waits for these: requires_grad_(True) had unfrozen them. Build GrassAdamW(model), which "
            "freezes them, before DistributedDataParallel"
        )
    for layer in layers:
        layer.take_flag()


def note_seeds(groups: Iterable[dict[str, Any]], layers: Layers, states: Mapping[Tensor, State]) -> None:
    """Warn if an optimizer begins to draw rows of layers that another one with its seed has drawn before."""
    again = None
    for group in groups:
        for p in group["params"]:
            if (layer := layers.get(id(p))) is None:
                continue
            seed, owner = layer.drawn_by or (None, None)
            if seed == group["seed"] and owner is not layer.owner and not states.get(p):
                again = layer
            layer.drawn_by = group["seed"], layer.owner
    if again is not None and again.drawn_by is not None:
        logger.warning(
            "Grass: this optimizer has seed=%d, as the one that trained %r before, and draws the same %s again: those "
            "that it did not reach stay behind. Keep one optimizer, or give each a seed of its own",
            again.drawn_by[0],
            again.label,
            ("rows", "columns")[again.dim],
        )


def wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and all that its attributes hold, also in lists and dicts, as wrappers hold those they step."""
    found: dict[int, Optimizer] = {id(optimizer): optimizer}
    waiting = [optimizer]
    while waiting:
        for value in vars(waiting.pop()).values():
            for inner in _optimizers(value):
                if id(inner) not in found:
                    found[id(inner)] = inner
                    waiting.append(inner)
    return list(found.values())


def _optimizers(value: Any) -> Iterable[Optimizer]:
    if isinstance(value, dict):
        value = list(value.values())
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Optimizer)]
