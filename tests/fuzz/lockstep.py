"""Two copies of one model do the same in lockstep: one plain, one streamed, offloaded or both."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_copies import InPlace
from tests.fuzz.run import Run
from tests.fuzz.settings import ATTACHED, Place, Setting

Action = tuple[str, dict[str, Any]]
"""A method of :class:`tests.fuzz.run.Run` and its arguments."""
OBSERVE: Action = ("state", {"what": "both"})


def in_lockstep(setting: Setting, place: Place, actions: list[Action], *, late: bool = False) -> None:
    """Do the same with a plain model and one that lies elsewhere, and compare what is seen."""
    if setting.mode in ATTACHED:
        place = Place(place.stream or (), None, place.device)
    moves = [arguments["place"] for name, arguments in actions if name == "move"]
    in_files = any(dict(each.stream or ()).get("path") for each in (place, *moves))
    setting = comparable(setting) if in_files else setting
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        held = Late(patch) if late else None
        runs = [Run(setting, each, Path(directory), in_files=in_files) for each in (place.plain(), place)]
        try:
            for number, (name, arguments) in enumerate([*actions, OBSERVE]):
                seen = []
                for run, other in zip(runs, reversed(runs), strict=True):
                    torch.manual_seed(number)
                    more: dict[str, Any] = {"other": other} if name == "load" else {}
                    if name == "move" and run is runs[0]:
                        more = {"place": None}
                    seen.append(getattr(run, name)(**{**arguments, **more}))
                found = difference(*seen)
                assert found is None, f"{name} {arguments}: {found}"
        finally:
            if held is not None:
                held.release()
            runs[1].close()
            del runs


def comparable(setting: Setting) -> Setting:
    """The setting, without what differs as documented where steps do not write to files.

    That is the last bit of rows more precise than their weight, and the bits that stochastic rounding draws.
    """
    differs = setting.weights == "bfloat16 under float32" or dict(setting.options)["moment_dtype"] == "bfloat16"
    return replace(setting, explore=2) if differs else setting


class Late:
    """While it is on, copies and steps beside the loop go on only while somebody waits for them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._changed, self._waiting = threading.Condition(), 0
        wait, drain = Executor.wait, Executor.drain
        patch.setattr(Executor, "wait", lambda *args, **kwargs: self._while(wait, *args, **kwargs))
        patch.setattr(Executor, "drain", lambda *args, **kwargs: self._while(drain, *args, **kwargs))
        for owner, name in ((Link, "up"), (Link, "down"), (InPlace, "step")):
            patch.setattr(owner, name, self._after(getattr(owner, name)))

    def release(self) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()

    def _while(self, wait: Any, *args: Any, **kwargs: Any) -> None:
        self.release()
        try:
            wait(*args, **kwargs)
        finally:
            with self._changed:
                self._waiting -= 1

    def _after(self, work: Any) -> Any:
        def later(*args: Any, **kwargs: Any) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting > 0)
            return work(*args, **kwargs)

        return later


def difference(a: Any, b: Any, where: str = "") -> str | None:
    """Where two nests of values differ; ``None`` if nowhere."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.cpu(), b.cpu()
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{where}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
        equal = torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        return None if equal else f"{where}: by up to {(a.double() - b.double()).abs().max():.3g}"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((d for key in a if (d := difference(a[key], b[key], f"{where}/{key}"))), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)}, {len(b)} items"
        return next(
            (d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := difference(x, y, f"{where}/{i}"))), None
        )
    same = a == b or (a != a and b != b)
    return None if same else f"{where}: {a}, {b}"
