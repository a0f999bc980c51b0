"""The grid of a study: a YAML file that becomes a list of cells, each one training run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grass.memory.llama import LLAMA_SHAPES
from grass.options import DEFAULTS
from grass.sweep.bracket import best_point, next_points

sys.path.append(str(Path(__file__).parents[1]))
from training.data.blocks import DataConfig
from training.finetune.run import ADAPTERS
from training.run.optimizers import OptimizerConfig

CURVE_POINTS = 10
"""Evaluations per run, at equal distances."""

NOT_SETTINGS = frozenset({"name", "seed"})
"""Fields of an :class:`OptimizerConfig` that have a column of their own in the results."""

OF_THE_CELL = (
    "clip",
    "autocast",
    "bf16_weights",
    "final_lr",
    "batch_size",
    "adapter",
    "adapter_rank",
    "only_projected",
)
"""Settings of a :class:`Cell` itself; methods and studies may have them too."""

BASE_MODEL = "1m"
"""Size of the base model that finetuning starts from."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What the cells of a finetuning task train on.

    Attributes:
        batch_size: examples, or rows of examples where they are packed.
        max_length: tokens of an example, or of a row.
        examples: of each split, at most; ``None`` for all.
    """

    batch_size: int
    max_length: int
    examples: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_length", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Invalid {name}={value}: must be >= 1")


FINETUNING = {
    "classify": FinetuneConfig(batch_size=16, max_length=64),
    "instruct": FinetuneConfig(batch_size=8, max_length=256),
    "facts": FinetuneConfig(batch_size=8, max_length=256),
}
"""Which package a docstring is from; the docstring of a function's signature; words that nobody has seen before."""
TASKS = ("pretrain", *FINETUNING)

GRID_KEYS = {"model", "data", "finetuning", "horizons", "methods", "studies"}
OPTIONAL_KEYS = {"task", "model", "set", "vary", "bracket"}
STUDY_KEYS = {"name", "methods", "horizon", "seeds", *OPTIONAL_KEYS}
Losses = Mapping[tuple[str, ...], float]
"""Final losses by the key of a cell."""
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run.

    Attributes:
        task: one of :data:`TASKS`.
        model: size, a key of :data:`LLAMA_SHAPES`.
        steps: horizon, to which the learning rate decays; a multiple of :data:`CURVE_POINTS`.
        seed: of the initial weights (in finetuning a classifier's head alone), the order of the data and the row
            selection.
        optimizer: and its hyperparameters; its own ``seed`` is that of the cell.
        clip: largest norm of the gradient; 0 does not clip.
        autocast: compute in bfloat16. ``False`` suits CPUs without instructions for it.
        bf16_weights: in pretraining, weights are stored in bfloat16, as by the recipes. Needs ``autocast=False``.
        final_lr: in pretraining, learning rate of the last step, as a share of the peak.
        batch_size: in pretraining, sequences of a step; ``None``: the grid's.
        adapter: in finetuning, one of :data:`training.finetune.run.ADAPTERS`, which AdamW trains.
        adapter_rank: its rank.
        only_projected: in finetuning, embeddings, norms and head are frozen, but for a classifier's head, which is new.
            With an adapter, ``False`` trains them.
    """

    task: str = "pretrain"
    model: str
    steps: int
    seed: int
    optimizer: OptimizerConfig
    clip: float = 1.0
    autocast: bool = True
    bf16_weights: bool = False
    final_lr: float = 0.1
    batch_size: int | None = None
    adapter: str | None = None
    adapter_rank: int | None = None
    only_projected: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"Unknown task {self.task!r}; available: {', '.join(TASKS)}")
        if self.model not in LLAMA_SHAPES:
            raise ValueError(f"Unknown model {self.model!r}; available: {', '.join(LLAMA_SHAPES)}")
        if self.task != "pretrain" and self.model != BASE_MODEL:
            raise ValueError(f"Invalid model={self.model} for task={self.task}: finetuning starts from {BASE_MODEL}")
        if self.steps < CURVE_POINTS or self.steps % CURVE_POINTS:
            raise ValueError(f"Invalid steps={self.steps}: must be a positive multiple of {CURVE_POINTS}")
        if self.clip < 0:
            raise ValueError(f"Invalid clip={self.clip}: must be >= 0, where 0 does not clip")
        for name in ("bf16_weights", "final_lr", "batch_size"):
            if self.task != "pretrain" and (value := getattr(self, name)) != getattr(Cell, name):
                raise ValueError(f"Invalid {name}={value} for task={self.task}: only pretraining takes it")
        if self.bf16_weights and self.autocast:
            raise ValueError("Invalid bf16_weights=True with autocast=True: autocast is for float32 weights")
        self._check_finetuning()
        if self.seed != self.optimizer.seed:
            raise ValueError(f"Invalid seed={self.optimizer.seed} of the optimizer in a cell with seed={self.seed}")

    def _check_finetuning(self) -> None:
        given = {"adapter": self.adapter, "adapter_rank": self.adapter_rank, "only_projected": self.only_projected}
        if self.task == "pretrain" and any(given.values()):
            raise ValueError(f"Invalid {given} for task=pretrain: they are for finetuning")
        if self.adapter is not None and (self.adapter not in ADAPTERS or self.optimizer.name != "adamw"):
            raise ValueError(
                f"Invalid adapter={self.adapter} with {self.optimizer.name}: must be one of {', '.join(ADAPTERS)}, "
                "trained by adamw"
            )
        if (self.adapter is None) != (self.adapter_rank is None):
            raise ValueError(f"Invalid adapter={self.adapter} with adapter_rank={self.adapter_rank}: both or none")

    @cached_property
    def settings(self) -> str:
        """The learning rate and what differs from the defaults, as in ``"lr=0.003 rank=0.125"``."""
        fields = (field for field in dataclasses.fields(self.optimizer) if field.name not in NOT_SETTINGS)
        values = [(field.name, getattr(self.optimizer, field.name), _default(field)) for field in fields]
        values += [(name, getattr(self, name), getattr(Cell, name)) for name in OF_THE_CELL]
        return " ".join(
            f"{name}={_spelled(value)}"
            for name, value, default in values
            if name == "lr" or value not in (None, default)
        )

    @property
    def key(self) -> tuple[str, ...]:
        """What tells a cell from all others: the columns of its row that are no results."""
        return self.task, self.model, str(self.steps), str(self.seed), self.optimizer.name, self.settings


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question: the cells that answer it.

    Attributes:
        name: what is varied, in a few words; studies of one name make one table.
        cells: in the order in which they run.
    """

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All studies, in order of importance: an interrupted grid has answered the first.

    Attributes:
        data: what every pretraining cell trains on; each shuffles it with its own seed.
        finetuning: likewise for finetuning, by task.
        studies: a cell that occurs in several runs once.
    """

    data: DataConfig
    finetuning: Mapping[str, FinetuneConfig]
    studies: tuple[Study, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once, in the order in which they run."""
        return list({cell.key: cell for study in self.studies for cell in study.cells}.values())

    @property
    def names(self) -> list[str]:
        """The names of the studies, each once."""
        return list(dict.fromkeys(study.name for study in self.studies))

    def study(self, name: str) -> Study:
        """The cells of all studies of this name, as one; none if there is no such study."""
        return Study(
            name=name, cells=tuple(cell for study in self.studies if study.name == name for cell in study.cells)
        )


def load_grid(path: Path, losses: Losses | None = None) -> Grid:
    """Read a grid.

    The file has ``model``, ``data`` (of :class:`DataConfig`), ``horizons`` (steps by name), ``methods`` (settings of
    :class:`OptimizerConfig` by name), optionally ``finetuning`` (by task, what differs from :data:`FINETUNING`) and
    ``studies``, a list of mappings: ``name``; ``methods``, names; ``horizon``, a name; ``seeds``; and optionally
    ``task``, ``model``, ``set`` (settings on top of the methods', and those of :data:`OF_THE_CELL`), ``vary``
    (lists of values; their product is run) or ``bracket`` (one setting and its first value: with the first seed it is
    halved and doubled until the best value is inside of those that ran; then the other seeds run with that).

    Args:
        path: of the file.
        losses: of the cells that have ended. A bracket goes on from them.

    Raises:
        ValueError: a key, name or value is unknown; the message names it.
    """
    document = yaml.safe_load(path.read_text()) or {}
    _check_keys(document, GRID_KEYS, "the grid", optional={"finetuning"})
    changed = document.get("finetuning", {})
    _check_keys(changed, set(FINETUNING), "finetuning", optional=set(FINETUNING))
    finetuning = {
        task: _build(FinetuneConfig, dataclasses.asdict(config) | changed.get(task, {}))
        for task, config in FINETUNING.items()
    }
    studies = tuple(_study(entry, document, losses or {}) for entry in document["studies"])
    return Grid(data=_build(DataConfig, document["data"]), finetuning=finetuning, studies=studies)


def _study(entry: Mapping[str, Any], document: Mapping[str, Any], losses: Losses) -> Study:
    where = f"study {entry.get('name')!r}"
    _check_keys(entry, STUDY_KEYS, where, optional=OPTIONAL_KEYS)
    lists = {"methods": entry["methods"], "seeds": entry["seeds"], **entry.get("vary", {})}
    for name, values in lists.items():
        if not isinstance(values, list):
            raise ValueError(f"Invalid {name}={values!r} in {where}: must be a list, as in [{values}]")
    bracket = entry.get("bracket", {})
    if "bracket" in entry and (
        not isinstance(bracket, dict) or len(bracket) != 1 or "vary" in entry or not entry["seeds"]
    ):
        raise ValueError(f"Invalid {bracket=} in {where}: takes one setting, seeds, and no vary")
    try:
        return Study(name=entry["name"], cells=tuple(_cells(entry, document, losses)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} (in {where})") from error


def _cells(entry: Mapping[str, Any], document: Mapping[str, Any], losses: Losses) -> Iterator[Cell]:
    for method in entry["methods"]:
        if "bracket" in entry:
            yield from _bracketed(entry, document, method, losses)
            continue
        varied = entry.get("vary", {})
        for seed, *values in itertools.product(entry["seeds"], *varied.values()):
            yield _cell(entry, document, method, seed, dict(zip(varied, values, strict=True)))


def _bracketed(entry: Mapping[str, Any], document: Mapping[str, Any], method: str, losses: Losses) -> Iterator[Cell]:
    """The values that ran and those that are next; when the best is inside, it with the other seeds."""
    ((name, start),) = entry["bracket"].items()
    first, *others = entry["seeds"]
    known: dict[tuple[int, ...], float] = {}
    while points := next_points(known, rates=1, level=0):
        cells = [_cell(entry, document, method, first, {name: start * 2.0**doubled}) for (doubled,) in points]
        yield from cells
        if any(cell.key not in losses for cell in cells):
            return
        for point, cell in zip(points, cells, strict=True):
            known[point] = math.inf if math.isnan(losses[cell.key]) else losses[cell.key]
    best = start * 2.0 ** best_point(known, level=0)[0]
    yield from (_cell(entry, document, method, seed, {name: best}) for seed in others)


def _cell(
    entry: Mapping[str, Any], document: Mapping[str, Any], method: str, seed: int, varied: Mapping[str, Any]
) -> Cell:
    chosen = {**_look_up(document["methods"], method, "method"), **entry.get("set", {}), "seed": seed, **varied}
    own = {name: chosen.pop(name, getattr(Cell, name)) for name in OF_THE_CELL}
    steps = _look_up(document["horizons"], entry["horizon"], "horizon")
    task, model = entry.get("task", "pretrain"), entry.get("model", document["model"])
    optimizer = _build(OptimizerConfig, chosen)
    return Cell(task=task, model=model, steps=steps, seed=seed, optimizer=optimizer, **own)


def _build(cls: type[Any], settings: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(cls)}
    _check_keys(settings, fields, cls.__name__, optional=fields)
    return cls(**{name: _value(value) for name, value in settings.items()})


def _value(value: Any) -> Any:
    """What YAML means: lists are tuples, and ``1e-3``, which YAML 1.1 takes for a string, is a number."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _check_keys(mapping: Mapping[str, Any], allowed: set[str], where: str, *, optional: set[str]) -> None:
    unknown, missing = sorted(mapping.keys() - allowed), sorted(allowed - optional - mapping.keys())
    if unknown:
        raise ValueError(f"Unknown {', '.join(unknown)} in {where}; allowed: {', '.join(sorted(allowed))}")
    if missing:
        raise ValueError(f"No {', '.join(missing)} in {where}")


def _look_up(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise ValueError(f"Unknown {what} {name!r}; available: {', '.join(table)}")
    return table[name]


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; an interval of ``None`` stands for that of :class:`grass.GrassAdamW`."""
    return DEFAULTS["update_interval"] if field.name == "update_interval" else field.default


def _spelled(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
