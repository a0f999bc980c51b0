"""The processes of a sweep: which trial starts where, what becomes of processes, and the table."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grass.sweep.board import Board
from grass.sweep.devices import claim_name
from grass.sweep.grid import Kind, Place, Settings, described
from grass.sweep.journal import Journal, Record
from grass.sweep.lock import Lock
from grass.sweep.order import Seconds, longest_first
from grass.sweep.progress import Bars
from grass.sweep.proposals import Proposals
from grass.sweep.stopping import StopRule
from grass.sweep.worker import GUARD, work

CONTEXT: Any = multiprocessing.get_context("spawn")

PATIENCE = 10
"""Seconds that a trial has to end when the sweep ends."""

LIVES = 2
"""Processes that may die on a trial before it counts as failed."""

FAILED = ("error", "out of memory")


@dataclass
class Running:
    """A trial that has a process, and the locks on the trial and its device."""

    place: Place
    process: BaseProcess
    locks: list[Lock]


class Sweep:
    """Trials, their journals, and the processes that this command has started."""

    def __init__(
        self,
        kind: Kind,
        grid: list[Settings],
        devices: list[str],
        stop: StopRule | None = None,
        proposals: Proposals | None = None,
        bars: Bars | None = None,
        board: Board | None = None,
        seconds: Seconds | None = None,
    ) -> None:
        self.kind, self.stop, self.proposals, self.seconds = kind, stop, proposals, seconds
        self.bars, self.board = bars, board
        self.locks = kind.out / "locks"
        self.locks.mkdir(parents=True, exist_ok=True)
        self.journals: dict[Path, Journal] = {}
        self.every: list[Place] = []
        for settings in grid:
            self._add(settings)
        self.running: dict[str, Running | None] = dict.fromkeys(devices)

    def _add(self, settings: Settings) -> Place:
        place = self.kind.place(settings)
        if place.stem not in self.journals:
            self.journals[place.stem] = Journal(place.path("jsonl"))
            self.every.append(place)
        return place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all processes of this command."""
        live = [running for running in self.running.values() if running]
        for running in live:
            running.process.terminate()
        for running in live:
            running.process.join(PATIENCE)
            running.process.kill()
            running.process.join()
            for lock in running.locks:
                lock.release()
        for display in (self.bars, self.board):
            if display:
                display.close()

    def turn(self) -> bool:
        """Look after every device once; whether all trials have ended."""
        for device, running in self.running.items():
            if running and not running.process.is_alive():
                self.running[device] = None
                self._bury(running)
            if self.running[device] is None:
                self.running[device] = self._start(device)
        ended = [self._report(place) for place in self.every]
        return all(ended) and not any(self.running.values()) and not (self.proposals and self.proposals.left())

    def _report(self, place: Place) -> bool:
        """Show a trial, tell the study if it has ended, and return whether it has."""
        row = self.row(place)
        if self.bars:
            self.bars.show(place, row)
        if self.board:
            self.board.show(place, self.journals[place.stem], row)
        if row["end"] and self.proposals:
            self.proposals.tell(place.settings, row["end"], row["loss"])
        return row["end"] is not None

    def table(self) -> list[dict[str, Any]]:
        """A record for each trial."""
        return [self.row(place) for place in self.every]

    def row(self, place: Place) -> dict[str, Any]:
        """What is known of a trial."""
        losses = self.journals[place.stem].read().losses
        step = next(reversed(losses), None)
        ending = self.ending(place) or {}
        return {
            **place.settings,
            "end": ending.get("end"),
            "step": step,
            "loss": None if step is None else losses[step],
            "message": ending.get("message"),
        }

    def ending(self, place: Place) -> Record | None:
        """How a trial ended, if it did. That another rule stopped it is no ending here."""
        ending = None
        for record in self.journals[place.stem].read().events:
            if "again" in record:
                ending = None
            elif "end" in record and record.get("rule") in (None, described(self.stop)):
                ending = record
        return ending

    def forget_failures(self) -> None:
        """Let trials start again that failed, unless another command does already."""
        for place in self.every:
            if (lock := Lock.take(place.path("lock"))) is not None:
                if (ending := self.ending(place)) and ending["end"] in FAILED:
                    self.journals[place.stem].append(again=True)
                lock.release()

    def _start(self, device: str) -> Running | None:
        """Start the first trial that has not ended and that nobody runs, if the device is free."""
        if not (self.proposals and self.proposals.left()) and all(self.ending(place) for place in self.every):
            return None
        claim = Lock.take(self.locks / claim_name(device))
        if claim is None:
            return None
        for place in self._candidates():
            lock = Lock.take(place.path("lock"))
            if lock is None:
                continue
            if self.ending(place):  # meanwhile
                lock.release()
                continue
            rivals = [other for other in self.every if other != place]
            arguments = (self.kind, place, rivals, self.stop, device, [lock, claim])
            process = CONTEXT.Process(target=work, args=arguments, name=place.name)
            process.start()
            return Running(place, process, [lock, claim])
        claim.release()
        return None

    def _candidates(self) -> Iterator[Place]:
        """Trials that have not ended, the longest first, then new ones."""
        left = [place for place in self.every if not self._report(place)]
        if len(self.running) > 1:  # on one device the order changes nothing
            left = longest_first(left, self.every, self.journals, self.kind.steps, self.seconds)
        yield from left
        while self.proposals and (settings := self.proposals.ask()) is not None:
            place = self._add(settings)
            if not self._report(place):
                yield place

    def _bury(self, running: Running) -> None:
        """Act on how a process ended, then let others have its device.

        Raises:
            RuntimeError: it never began.
            ValueError: the trial cannot be swept.
        """
        place, journal = running.place, self.journals[running.place.stem]
        try:
            last = next(iter(reversed(journal.read().events)), {})
            if "misuse" in last:
                name = f"{described(self.kind.trial)} with {place.name}"
                raise ValueError(f"The trial {name} cannot be swept: {last['misuse']}")
            if not self.ending(place):
                self._note_death(journal, running.process.exitcode or 0)
        finally:
            for lock in running.locks:
                lock.release()

    def _note_death(self, journal: Journal, code: int) -> None:
        """Count a death. The last one that a trial may have is its ending."""
        if code > 0 and not any("start" in event for event in journal.events):
            raise RuntimeError(
                f"The trial {described(self.kind.trial)} could not start in another process, which says why on stderr. "
                f"It has to be importable, and {GUARD}"
            )
        journal.append(died=code)
        if deaths(journal.read().events) >= LIVES:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            journal.append(end="error", message=f"Its process died {LIVES} times, the last time {how}")


def deaths(events: list[Record]) -> int:
    """How many processes have died on a trial since it was started, or started again."""
    count = 0
    for event in events:
        count = 0 if "again" in event else count + ("died" in event)
    return count
