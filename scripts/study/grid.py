"""The grid of a study: a YAML file that becomes a list of cells, each one training run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grass.training.data import DataConfig
from grass.training.models import LLAMA_SHAPES
from grass.training.optimizers import OptimizerConfig
from prototypes import PrototypeConfig

CURVE_POINTS = 10
"""Evaluations per run, at equal distances."""

NOT_SETTINGS = frozenset({"name", "seed"})
"""Fields of an :class:`OptimizerConfig` that have a column of their own in the results."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run.

    Attributes:
        model: size, a key of :data:`LLAMA_SHAPES`.
        steps: horizon, to which the learning rate decays; a multiple of :data:`CURVE_POINTS`.
        seed: of the initial weights, the order of the data and the row selection.
        optimizer: and its hyperparameters; its own ``seed`` is that of the cell.
    """

    model: str
    steps: int
    seed: int
    optimizer: OptimizerConfig

    def __post_init__(self) -> None:
        if self.model not in LLAMA_SHAPES:
            raise ValueError(f"Unknown model {self.model!r}; available: {', '.join(LLAMA_SHAPES)}")
        if self.steps < CURVE_POINTS or self.steps % CURVE_POINTS:
            raise ValueError(f"Invalid steps={self.steps}: must be a positive multiple of {CURVE_POINTS}")
        if self.seed != self.optimizer.seed:
            raise ValueError(f"Invalid seed={self.optimizer.seed} of the optimizer in a cell with seed={self.seed}")

    @cached_property
    def settings(self) -> str:
        """The learning rate and what differs from the defaults, as in ``"lr=0.003 rank=0.125"``."""
        fields = (field for field in dataclasses.fields(self.optimizer) if field.name not in NOT_SETTINGS)
        values = [(field.name, getattr(self.optimizer, field.name), field.default) for field in fields]
        return " ".join(
            f"{name}={_spelled(value)}" for name, value, default in values if name == "lr" or value != default
        )

    @property
    def key(self) -> tuple[str, ...]:
        """What tells a cell from all others: the columns of its row that are no results."""
        return self.model, str(self.steps), str(self.seed), self.optimizer.name, self.settings


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
        data: what every cell trains on; each shuffles it with its own seed.
        studies: a cell that occurs in several runs once.
    """

    data: DataConfig
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


def load_grid(path: Path) -> Grid:
    """Read a grid.

    The file has ``model``, ``data`` (of :class:`DataConfig`), ``horizons`` (steps by name), ``methods`` (settings of
    :class:`OptimizerConfig` by name) and ``studies``, a list of mappings: ``name``; ``methods``, names; ``horizon``, a
    name; ``seeds``; and optionally ``model``, ``set`` (settings on top of the methods') and ``vary`` (lists of values;
    their product is run).

    Raises:
        ValueError: a key, name or value is unknown; the message names it.
    """
    document = yaml.safe_load(path.read_text())
    _check_keys(document, {"model", "data", "horizons", "methods", "studies"}, "the grid")
    studies = tuple(_study(entry, document) for entry in document["studies"])
    return Grid(data=_build(DataConfig, document["data"]), studies=studies)


def _study(entry: Mapping[str, Any], document: Mapping[str, Any]) -> Study:
    _check_keys(entry, {"name", "methods", "horizon", "seeds", "model", "set", "vary"}, f"study {entry.get('name')!r}")
    steps = _look_up(document["horizons"], entry["horizon"], "horizon")
    varied = entry.get("vary", {})
    cells = []
    for method, seed in itertools.product(entry["methods"], entry["seeds"]):
        settings = {**_look_up(document["methods"], method, "method"), **entry.get("set", {}), "seed": seed}
        for values in itertools.product(*varied.values()):
            kind = PrototypeConfig if settings["name"] == "prototype" else OptimizerConfig
            optimizer = _build(kind, settings | dict(zip(varied, values, strict=True)))
            model = entry.get("model", document["model"])
            cells.append(Cell(model=model, steps=steps, seed=seed, optimizer=optimizer))
    return Study(name=entry["name"], cells=tuple(cells))


def _build(cls: type[Any], settings: Mapping[str, Any]) -> Any:
    _check_keys(settings, {field.name for field in dataclasses.fields(cls)}, cls.__name__)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})


def _check_keys(mapping: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(mapping.keys() - allowed)
    if unknown:
        raise ValueError(f"Unknown {', '.join(unknown)} in {where}; allowed: {', '.join(sorted(allowed))}")


def _look_up(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise ValueError(f"Unknown {what} {name!r}; available: {', '.join(table)}")
    return table[name]


def _spelled(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
