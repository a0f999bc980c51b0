"""Conversion of a model to compact mode, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.calibration import calibrate
from grass.compact_mode.expert_conversion import experts_to_convert, is_converted, put_beside, take_away
from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.int8 import Int8Storage
from grass.compact_mode.layer import LAYERS, CompactLayer
from grass.compact_mode.linear_classes import compact_class, taken_names
from grass.compact_mode.registry import take_flags
from grass.compact_mode.strata import of_stratum, strata_of
from grass.compact_mode.synced_rows import SyncedRows
from grass.compact_mode.unconvertible import check_not_lazy, check_not_sharded, check_not_wrapped, unconvertible
from grass.coverage import report_rank
from grass.options import check_value, resolve_rank
from grass.parallel.shards import is_wrapper, local
from grass.selection.exploration import gradient_scale, reach, resolve_explore
from grass.targets import Targets, matched_modules, report_coverage

logger = logging.getLogger("grass")


@dataclass(frozen=True)
class _Wanted:
    """What layers are converted with, as given to :func:`compact`.

    Raises:
        TypeError: a value of another type.
        ValueError: a value that is not allowed.
    """

    rank: int | float
    explore: int | float | None
    dim: int
    dtype: torch.dtype | None
    weights: str | None

    def __post_init__(self) -> None:
        check_value("rank", self.rank)
        check_value("explore", self.explore)
        rank, dim, dtype, weights = self.rank, self.dim, self.dtype, self.weights
        if rank is None or dim not in (0, 1):
            raise ValueError(
                f"Invalid {rank=} or {dim=}: compact mode needs a rank, and dim must be 0 (rows) or 1 (columns)"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"Invalid {dtype=}: must be a floating-point type, or None for the weight's own")
        if weights not in (None, "int8"):
            raise ValueError(f"Invalid {weights=}: must be 'int8', or None for the weights as they are")


def compact(
    model: nn.Module,
    rank: int | float,
    *,
    explore: int | float | None = None,
    dim: int = 1,
    targets: Targets = None,
    exclude: Targets = (),
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    seed: int = 0,
    calibration: Callable[[nn.Module], Tensor] | None = None,
) -> list[str]:
    """Convert linear layers in place: freeze their weights and make the selected rows of each a parameter.

    Call it before the optimizer is built and before DDP, ``fully_shard`` or ``torch.compile``, and after
    ``parallelize_module`` (:mod:`grass.compact_mode.tensor_parallel`, :mod:`grass.compact_mode.expert_parallel`). Then
    ``layer.active`` trains: ``r`` selected rows with optimizer state and ``q`` explored rows without
    (:mod:`grass.selection.exploration`). Its shape is ``(r + q, n)`` for ``dim=0`` and ``(m, r + q)`` for ``dim=1``.
    The gradient of the full weight is never formed. ``model.state_dict()`` stays that of the plain model. The
    attributes of the weight, as ``_no_weight_decay``, are those of ``layer.active``, too. The first rows are drawn
    uniformly with ``seed``. One line reports the share of the parameters that is converted and the weights that train
    at full rank: on the logger ``grass``, or on stderr if logging is not configured.

    These layers stay as they are, with a log message: layers whose weight is shared with another module, frozen, or
    read by the enclosing module itself, layers with attributes of their own under names that converted layers use, and
    layers that are no plain ``nn.Linear`` or ``Conv1D`` (quantised, wrapped by PEFT). A layer that is
    converted already keeps its rows if rank, explore and dim are the same.

    Args:
        model: any module.
        rank: rows with optimizer state per weight, an integer or a fraction of the selected dimension.
        explore: other rows that move in each step, a count or a fraction of the selected dimension, cut to the rows
            that are left; 0 for none. ``None`` explores as many rows as are selected.
        dim: 0 selects rows (output features), 1 columns (input features; these also save activation memory).
        targets: as in :func:`grass.matched_modules`.
        exclude: layers to leave out, given like ``targets``.
        dtype: dtype of the active rows. ``None``: the weight's own, or float32 with ``weights="int8"``. Use
            ``torch.float32`` for bfloat16 weights to keep updates that are too small for bfloat16.
        weights: ``"int8"`` stores the frozen weights in 8 bits (:mod:`grass.compact_mode.int8`); ``None`` leaves them
            as they are. With ``"int8"``, ``state_dict`` has ``weight_codes`` and scales, which plain models refuse:
            :func:`grass.compact_mode.int8.plain_state_dict` makes one that they load.
        seed: seed of the first selection.
        calibration: a function that runs a batch through the model and returns its loss. The first rows are then those
            with the largest gradient of this loss.

    Returns:
        The names of the converted layers.

    Raises:
        ValueError: nothing matches or nothing can be converted; rank and explore exceed a dimension; a layer is
            converted already with other values; a weight has no shape yet, as of ``nn.LazyLinear``;
            ``parallelize_module`` has placed a weight otherwise than as ``Shard`` over one dimension of a mesh, of
            experts otherwise than as ``Shard(0)``. The model is then as it was.
        RuntimeError: DDP has wrapped the model, or ``fully_shard`` has sharded it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    wanted = _Wanted(rank, explore, dim, dtype, weights)
    report_rank(rank)
    check_convertible(model)
    check_not_wrapped(model)
    check_not_lazy(model)
    experts = experts_to_convert(model, targets, exclude, dim)
    matched = matched_modules(model, targets, exclude, may_be_none=bool(experts))
    reasons, layers = unconvertible(model), {name: model.get_submodule(name) for name in matched}
    linear = {name: layer for name, layer in layers.items() if convertible(name, layer, reasons)}
    counts = {name: _checked_counts(name, layer, wanted) for name, layer in (linear | experts).items()}
    check_not_sharded(linear)
    if not counts:
        raise ValueError(f"None of the layers matched can be converted: {', '.join(map(repr, layers))}")
    with _undone_on_failure(model, experts.values()):
        for index, (name, (r, q)) in enumerate(counts.items()):
            if name in experts:
                _convert_experts(model, experts[name], name, r, q, wanted, (seed, index))
            elif not isinstance(linear[name], CompactLayer):
                _become(linear[name], compact_class(linear[name]))
                _convert(linear[name], name, r, q, wanted, (seed, index))
    if weights is not None:
        _warn_of_fast_path(model)
    if calibration is not None:
        calibrate(model, calibration)
    every = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, CompactLayer))
    report_coverage(model, "converted", [_weight_name(name, layer) for name, layer in every])
    return list(counts)


def _warn_of_fast_path(model: nn.Module) -> None:
    """Say that evaluations of ``nn.TransformerEncoderLayer`` read weights, which codes are not."""
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer))
    if torch.backends.mha.get_fastpath_enabled() and any(isinstance(each.linear1, CompactLayer) for each in encoders):
        logger.warning(
            "Grass: nn.TransformerEncoderLayer reads weights in evaluations, and cannot read those in 8 bits: call "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )


def expand(model: nn.Module) -> list[str]:
    """Undo :func:`compact`: converted layers become plain and trainable again. Returns their names."""
    check_convertible(model)
    names = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, CompactLayer):
            names.append(_weight_name(name, layer))
            layer.unconvert()
            _release(model, layer)
    return names


def _release(model: nn.Module, layer: CompactLayer) -> None:
    """Make a layer plain whose weight has all values, even if it was converted only in part."""
    LAYERS.discard(layer)
    if isinstance(layer, ExpertRows):
        take_away(model, layer)
        return
    for attribute in ("active", "chosen"):
        if hasattr(layer, attribute):
            delattr(layer, attribute)
    for attribute in CONVERSION_ATTRIBUTES:
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain_class)
    layer.weight.data = layer.weight.data.contiguous()
    layer.weight.requires_grad_(True)


@contextmanager
def _undone_on_failure(model: nn.Module, experts: Collection[ExpertRows]) -> Iterator[None]:
    """Make those layers plain again that were converted before an error, as when memory runs out.

    Weights that were stored in 8 bits by then keep the rounding.
    """
    before = {layer for layer in model.modules() if isinstance(layer, CompactLayer)}
    try:
        yield
    except BaseException:
        for rows in experts:
            rows.weight.requires_grad_(rows not in before)
        for layer in list(model.modules()):
            if isinstance(layer, CompactLayer) and layer not in before:
                if layer in LAYERS:
                    layer.unconvert()
                _release(model, layer)
        raise


def trainable_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The named parameters of a converted model that train.

    Raises:
        ValueError: the model has no active rows, or all of them are frozen.
    """
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    take_flags(layers)
    frozen = [layer.label for layer in layers if not layer.active.requires_grad]
    if layers and len(frozen) == len(layers):
        raise ValueError(
            f"The active rows of all {len(layers)} converted layers are frozen (requires_grad=False): unfreeze layers "
            "by layer.requires_grad_(True). If PEFT has frozen a base model, convert a model or wrap it by PEFT, not "
            "both, or train the adapters by torch.optim.AdamW"
        )
    _check_not_shared(model, layers)
    if frozen:
        logger.warning("Grass: active rows frozen (requires_grad=False), not trained: %s", ", ".join(map(repr, frozen)))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no active rows: convert it first, grass.compact(model, rank=...), or pass "
            "grass.param_groups(model, rank=...) or model.parameters() to train it from full gradients"
        )
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _check_not_shared(model: nn.Module, layers: Iterable[CompactLayer]) -> None:
    """Refuse a converted weight that another module has come to share, which would be frozen there.

    Raises:
        ValueError: for each of these layers alone, rows are selected and moved; names both.
    """
    owners = {id(layer.own_weight()): layer for layer in layers if not isinstance(layer, ExpertRows)}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            layer = owners.get(id(parameter))
            if layer is not None and layer is not module:
                raise ValueError(
                    f"The weight of the converted layer {layer.label!r} is also {f'{name}.{own}'!r}: tie weights "
                    f"before grass.compact(), which then leaves them at full rank, or exclude=[{layer.label!r}]"
                )


def convertible(name: str, layer: Any, reasons: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Whether :func:`compact` converts a layer that matches, or has converted it. Logs the reason if not.

    Args:
        name: the layer's name.
        layer: the module.
        reasons: why layers must not be converted, by name (:func:`grass.compact_mode.unconvertible.unconvertible`).
    """
    if isinstance(layer, CompactLayer):
        return True
    if name in reasons:
        logger.warning("Grass passes over %r: %s", name, reasons[name])
        return False
    if compact_class(layer) is None:
        logger.warning("Grass passes over %r: %s is no plain linear layer", name, type(layer).__name__)
        return False
    if names := taken_names(layer, CONVERSION_ATTRIBUTES):
        logger.warning("Grass passes over %r: converted layers use its attributes %s: rename them", name, names)
        return False
    if is_wrapper(layer.weight):
        logger.warning("Grass passes over %r: its weight is a %s", name, type(layer.weight).__name__)
        return False
    if not layer.weight.requires_grad:
        logger.warning("Grass passes over %r: its weight is frozen", name)
        return False
    return True


def _weight_name(name: str, layer: CompactLayer) -> str:
    """What a converted layer is called: its own name, or that of the experts' weight that it stands beside."""
    return layer.label if isinstance(layer, ExpertRows) else name


def _size(layer: Any, dim: int) -> int:
    """Rows or columns to select from: of a layer, of each expert, in each stratum."""
    if isinstance(layer, ExpertRows):
        return layer.shape[dim] // layer.experts
    cls: Any = type(layer) if isinstance(layer, CompactLayer) else compact_class(layer)
    return int(layer.weight.shape[dim ^ cls.stores_transposed]) // strata_of(layer, dim)


def _checked_counts(name: str, layer: Any, wanted: _Wanted) -> tuple[int, int]:
    """Numbers of rows that a plain or converted layer selects and explores, of each expert and in each stratum."""
    dim, size = wanted.dim, _size(layer, wanted.dim)
    _check_precision(name, layer.weight.dtype, wanted.dtype, wanted.weights)
    rank, explore = of_stratum(layer, wanted.rank, wanted.explore, dim, wanted.weights)
    resolved = resolve_rank(rank, size)
    if resolved > size:
        raise ValueError(f"Invalid {rank=}: must be a fraction in (0, 1] or an integer up to {size} ({name!r}, {dim=})")
    explored = resolve_explore(explore, resolved, size)
    if resolved + explored > size:
        raise ValueError(
            f"Invalid {explore=}: must be a fraction or an integer up to {size - resolved} ({name!r}, {dim=})"
        )
    if isinstance(layer, CompactLayer) and is_converted(layer):
        r, q = (count // layer.experts for count in layer.counts())
        was = r, layer.dim, q, layer.active.dtype, layer.weights
        asked = resolved, dim, explored, wanted.dtype or layer.active.dtype, wanted.weights
        if was != asked:
            form = "rank={}, dim={}, explore={}, dtype={}, weights={!r}"
            given, now = (form.format(*values) for values in (was, asked))
            raise ValueError(f"{name!r} was converted with {given}, not {now}; call grass.expand(model) first")
    return resolved, explored


def _check_precision(name: str, own: torch.dtype, dtype: torch.dtype | None, weights: str | None) -> None:
    """Refuse active rows of another precision than their weight's and float32: these would not agree."""
    if weights is None and own.is_floating_point and dtype not in (None, own, torch.float32):
        raise ValueError(f"Invalid {dtype=}: must be torch.float32, or None for the weight's own, {own} ({name!r})")


def _become(layer: Any, cls: type[CompactLayer] | None) -> None:
    """Turn a plain layer into a :class:`CompactLayer`; the module and its weight parameter stay the same objects."""
    layer.weight.requires_grad_(False)
    layer.__class__ = cls


def _convert_experts(
    model: nn.Module, rows: ExpertRows, name: str, r: int, q: int, wanted: _Wanted, first_draw: tuple[int, int]
) -> None:
    """Make active rows of all experts, ``r`` and ``q`` of each, unless they are there."""
    if not is_converted(rows):
        rows.weight.requires_grad_(False)
        _convert(rows, name, r * rows.experts, q * rows.experts, wanted, first_draw)
        put_beside(model, rows)


def _convert(layer: Any, name: str, rank: int, explored: int, wanted: _Wanted, first_draw: tuple[int, int]) -> None:
    """Choose the first rows of a layer and make them a parameter."""
    dim = wanted.dim
    if wanted.weights == "int8":
        layer.storage = Int8Storage()
    matrix = layer.as_matrix(local(layer.weight).detach().contiguous())
    seed, position = first_draw
    layer.label, layer.rank, layer.dim = name, rank, dim
    layer.first_draw = seed, layer.place(position)
    sizes = matrix.shape[dim], rank, explored
    layer.reach, layer.gradient_scale = (reach(*sizes), gradient_scale(*sizes)) if explored else (0.0, 1.0)
    layer.sketch, layer.signs, layer.synced = None, None, SyncedRows()
    layer.register_buffer(
        "chosen", torch.empty(rank + explored, dtype=torch.int64, device=matrix.device), persistent=False
    )
    layer.chosen.copy_(layer.draw_first())
    rows = layer.active_projector().gather(matrix).contiguous()
    layer.active = layer.as_parameter(rows.to(wanted.dtype or (torch.float32 if layer.weights else matrix.dtype)))
    if type(layer.weight) is nn.Parameter:  # flags by which loops choose parameters, as _no_weight_decay
        vars(layer.active).update(vars(layer.weight))
    layer.storage.store(layer, matrix)
    layer.mark_synced()
    LAYERS.add(layer)


def check_convertible(model: nn.Module) -> None:
    """Raise ``RuntimeError`` if the class of a module says, as ``not_convertible``, why its layers must stay."""
    for module in model.modules():
        if (reason := getattr(type(module), "not_convertible", None)) is not None:
            raise RuntimeError(reason)


CONVERSION_ATTRIBUTES = (
    "dim",
    "sketch",
    "signs",
    "norms",
    "selections",
    "first_draw",
    "first_rows",
    "label",
    "rank",
    "reach",
    "gradient_scale",
    "owner",
    "drawn_by",
    "storage",
    "synced",
    "listeners",
    "held_sketch",
)
"""Entries of a converted layer's ``__dict__`` that :func:`expand` removes, beside parameters and buffers."""
