"""One trial in a process of its own, to its end."""

from __future__ import annotations

import math
import multiprocessing
import operator
import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from grass.sweep.grid import Kind, Place, Trial, described
from grass.sweep.journal import Journal, Record
from grass.sweep.lock import Lock
from grass.sweep.stopping import StopRule

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""What errors say that are not of the types ``torch.OutOfMemoryError`` and ``MemoryError``."""

GUARD = "a script has to call grass.sweep.run under `if __name__ == '__main__':`"
"""What other processes need, which import the script."""

SKIPPED = ". It was interrupted before: if its checkpoint is from after that step, save after the yield, and remove it"

NOTHING = "it yielded nothing: a trial yields pairs of step and loss"

Pairs = Generator[tuple[int, float], None, None]


class Misuse(ValueError):
    """The trial is not what a sweep can run."""


class Ended(Exception):
    """The trial ended by an error, which ``record`` tells."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.record = record


def work(kind: Kind, place: Place, rivals: list[Place], stop: StopRule | None, device: str, locks: list[Lock]) -> None:
    """Run a trial and write its journal. ``locks`` are held until the process ends.

    An error of the trial is an ending. An error of the journal, as on a full disk, ends the process.
    """
    threading.Thread(target=die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends its trials itself
    _print_to(place)
    place.path("files").mkdir(exist_ok=True)
    journal = Journal(place.path("jsonl"))
    journal.append(start=device)
    pairs = guarded(kind.trial, {**place.settings, "folder": place.path("files"), "device": device})
    record = follow(pairs, journal, [Journal(rival.path("jsonl")) for rival in rivals], kind.steps, stop)
    with suppress(Ended):  # an error after the end
        pairs.close()
    journal.append(**record)


def follow(pairs: Pairs, journal: Journal, rivals: list[Journal], steps: int, stop: StopRule | None) -> Record:
    """Note the steps of a trial, and return how it ended.

    Steps that the journal has already, because the trial was interrupted later, keep the loss that was noted first.
    """
    noted = journal.read().losses
    resumed, (reached, loss) = bool(noted), next(reversed(noted.items()), (0, 0.0))
    if noted and (verdict := judge(reached, loss, rivals, steps, stop)):
        return verdict
    try:
        for step, loss in pairs:
            if step <= reached:
                continue
            if reached >= steps:
                break
            journal.append(step=step, loss=loss)
            reached = step
            if verdict := judge(step, loss, rivals, steps, stop):
                return verdict
    except Ended as ended:
        return ended.record
    if not reached:
        return {"misuse": NOTHING}
    if reached < steps:
        why = SKIPPED if resumed else ""
        return {"end": "error", "message": f"The trial yielded step {reached} last, not {steps}{why}"}
    return {"end": "done"}


def judge(step: int, loss: float, rivals: list[Journal], steps: int, stop: StopRule | None) -> Record | None:
    """The ending of a trial that is stopped here."""
    if not math.isfinite(loss):
        return {"end": "not finite"}
    if stop is None or step >= steps:
        return None
    others = [rival.read().losses.get(step, math.nan) for rival in rivals]
    behind = stop(step, steps, loss, [other for other in others if math.isfinite(other)])
    return {"end": "behind", "rule": described(stop)} if behind else None


def guarded(trial: Trial, arguments: dict[str, Any]) -> Pairs:
    """The trial's steps and losses, checked; its errors as :class:`Ended`."""
    try:
        last = 0
        for pair in _started(trial, arguments):
            step, loss = _numbers(pair)
            if step <= last:
                raise Misuse(f"it yielded step {step} after step {last}: steps are counted from 1 and increase")
            last = step
            yield step, loss
    except Misuse as error:
        raise Ended({"misuse": str(error)}) from error
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in text for w in OUT_OF_MEMORY)
        raise Ended({"end": "out of memory" if memory else "error", "message": text}) from error


def _started(trial: Trial, arguments: dict[str, Any]) -> Iterator[Any]:
    running = trial(**arguments)
    if not isinstance(running, Iterable):
        raise Misuse(f"it returned {running!r}: a trial yields pairs of step and loss")
    return iter(running)


def _numbers(pair: Any) -> tuple[int, float]:
    try:
        step, loss = pair
        return operator.index(step), float(loss)
    except (TypeError, ValueError):
        raise Misuse(f"it yielded {pair!r}: a trial yields pairs of step and loss") from None


def die_with_parent() -> None:
    """End this process when the one that started it ends, however it does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _print_to(place: Place) -> None:
    """Send what the trial prints to its log."""
    with place.path("log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
