"""The trials of a sweep: their settings, and where each keeps its files."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import pickle
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Trial = Callable[..., Iterable[tuple[int, float]]]
Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
Settings = dict[str, Any]

TAKEN = {"folder", "device", "end", "step", "loss", "message"}
"""Other arguments of a trial, and other columns of the table."""


@dataclass(frozen=True)
class Place:
    """One trial of a sweep: its settings and its files, which all begin with ``stem``."""

    settings: Settings
    stem: Path

    @property
    def name(self) -> str:
        """The settings in words."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())

    def path(self, suffix: str) -> Path:
        """The file with this suffix."""
        return self.stem.with_name(f"{self.stem.name}.{suffix}")


@dataclass(frozen=True)
class Kind:
    """What the trials of a sweep have in common: the function, their steps, and the folder."""

    trial: Trial
    steps: int
    out: Path

    def place(self, settings: Settings) -> Place:
        """The trial with these settings.

        The name of its files says the settings and has a digest of settings, ``steps`` and ``trial``. So trials of
        another kind can be in the same folder.
        """
        words = ",".join(f"{key}={value}" for key, value in settings.items())
        told_apart = [sorted(settings.items()), self.steps, described(self.trial)]
        digest = hashlib.sha256(json.dumps(told_apart).encode()).hexdigest()
        return Place(settings, self.out / f"{re.sub(r'[^-+=,.0-9A-Za-z_]', '_', words)[:80]}-{digest[:8]}")


def expanded(grid: Grid) -> list[Settings]:
    """The settings of every trial.

    Raises:
        TypeError: a value that is no number, string, bool or ``None``.
        ValueError: no trials, or one twice.
    """
    if isinstance(grid, Mapping):
        for key, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"Invalid grid[{key!r}]={values!r}: must be a list of values")
        grid = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    every = [plain(settings) for settings in grid]
    if not every:
        raise ValueError("The grid has no trials: give every setting at least one value")
    seen = set()
    for settings in every:
        if (text := json.dumps(settings, sort_keys=True)) in seen:
            raise ValueError(f"The grid has the trial {settings} twice")
        seen.add(text)
    return every


def check_trial(trial: Trial, every: Iterable[Iterable[str]]) -> None:
    """Refuse a trial that cannot run in another process or does not take the settings of these names.

    Raises:
        TypeError: it is not callable, cannot be pickled or lacks an argument.
        ValueError: a setting has a name that the sweep needs.
    """
    if not callable(trial):
        raise TypeError(f"Invalid trial={trial!r}: must be a generator function, or another callable")
    try:
        pickle.dumps(trial)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"The trial {described(trial)} cannot be pickled, so no other process can run it: define it at the top "
            f"level of a module ({error})"
        ) from error
    for names in every:
        if taken := TAKEN & {*names}:
            raise ValueError(f"No setting can be called {', '.join(sorted(taken))}: that is a name of the sweep's")
        arguments = [*names, "folder", "device"]
        try:
            inspect.signature(trial).bind(**dict.fromkeys(arguments))
        except TypeError as error:
            what = ", ".join(arguments)
            raise TypeError(f"The trial {described(trial)} does not take the arguments {what}: {error}") from error


def described(what: Any, depth: int = 3) -> str:
    """What tells one trial, stop rule or argument from another: the same text in every process.

    Of a function that is its name, of a method also what it belongs to, of a ``partial`` also its arguments. Of all
    else it is the ``repr``, or class and attributes where that has an address.
    """
    if isinstance(what, functools.partial):
        arguments = [
            *(described(each, depth) for each in what.args),
            *(f"{key}={described(each, depth)}" for key, each in sorted(what.keywords.items())),
        ]
        return f"{described(what.func)}({', '.join(arguments)})"
    if isinstance(what, types.MethodType):
        return f"{described(what.__self__, depth)}.{what.__name__}"
    if name := getattr(what, "__qualname__", None):
        return str(name)
    if " at 0x" not in repr(what):
        return repr(what)
    attributes = sorted(getattr(what, "__dict__", {}).items()) if depth else []
    said = ", ".join(f"{key}={described(value, depth - 1)}" for key, value in attributes)
    return f"{type(what).__qualname__}({said})" if said else type(what).__qualname__


def plain(settings: Mapping[str, Any]) -> Settings:
    """Settings as JSON stores them exactly."""
    return {key: _plain(key, value) for key, value in settings.items()}


def _plain(key: str, value: Any) -> Any:
    """A value that JSON stores exactly."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"Invalid setting {key}={value!r}: must be a number, string, bool or None")
    if isinstance(value, float) and value != value:
        raise ValueError(f"Invalid setting {key}={value!r}: must not be NaN")
    return value
