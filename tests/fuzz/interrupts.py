"""A training loop that is interrupted at a line of the package's code, as by Ctrl-C, and then goes on."""

from __future__ import annotations

import copy
import dis
import functools
import gc
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload
from grass.compact_mode.layer import CompactLayer
from tests.offload.training import same

ROOT = str(Path(grass.__file__).parent)
PLACES = tuple(f"{ROOT}/{name}" for name in ("offload/", "streaming/", "stepping/", "optimizer.py"))
LIMIT = 600.0
"""Seconds after which a try hangs."""
BEFORE, AFTER = 3, 5
"""Steps before the interrupted one, which ends in a selection, and after it."""
EXACT, MIXED, ERROR, HANG, WRONG = (
    "as without or with the step",
    "some parameters stepped",
    "clear error",
    "hang",
    "wrong",
)


class Case(NamedTuple):
    """What is interrupted.

    Attributes:
        mode: ``"full"``, ``"dense"``, ``"compact"``, ``"over bf16"`` or ``"over int8"``.
        part: of a training step: ``"forward"``, ``"backward"``, ``"step"``, ``"microbatches"`` or ``"save"``.
        offload: the optimizer's.
        stream: what ``grass.stream`` takes; ``None``: the model is resident.
        files: whether frozen tensors of the streamed model lie in files.
        device: computes.
    """

    mode: str
    part: str
    offload: Offload | None = None
    stream: dict[str, Any] | None = None
    files: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        where = [] if self.offload is None else [f"offload {self.offload.fraction:g}"]
        where += [] if self.stream is None else ["streamed", *self.stream, *(["files"] if self.files else [])]
        return ", ".join([self.part, self.mode, *where])


class Block(nn.Module):
    """Two layers and a norm, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Network(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Loop:
    """A model, its optimizer and its stream."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        self.model = Network(2 if case.stream is None else 4)
        if case.stream is None:
            self.model.to(case.device)
        options: dict[str, Any] = {"lr": 1e-2, "offload": case.offload}
        choice = {"update_interval": 2, "selection": "multinomial_norm"}
        if case.mode == "full":
            self.optimizer = GrassAdamW(self.model.parameters(), **options)
        elif case.mode == "dense":
            self.optimizer = GrassAdamW(grass.param_groups(self.model, rank=2, **choice), **options)
        else:
            half = case.mode == "over bf16"
            self.model = self.model.to(torch.bfloat16) if half else self.model
            weights = "int8" if case.mode == "over int8" else None
            explore = 0 if case.files else 2
            dtype = torch.float32 if half else None
            grass.compact(self.model, rank=2, explore=explore, dtype=dtype, weights=weights)
            self.optimizer = GrassAdamW(self.model, **options, **choice)
        self.stream: Any = None
        if case.stream is not None:
            self.directory = tempfile.TemporaryDirectory() if case.files else None
            path = None if self.directory is None else self.directory.name
            self.stream = grass.stream(self.model, case.device, **case.stream, offload=grass.Offload(path=path))
        self.loss: Any = None

    def forward(self, number: int) -> Tensor:
        ids = torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(number)).to(self.case.device)
        self.loss = nn.functional.cross_entropy(self.model(ids).float().flatten(0, 1), ids.roll(1).flatten())
        return self.loss

    def microbatches(self, number: int) -> None:
        if self.stream is None:
            self.forward(number).backward()
        else:
            self.stream.step([number, number + 50], self.forward)

    def train(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            if self.case.part == "microbatches":
                self.microbatches(number)
            else:
                self.forward(number).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def prepare(self) -> Callable[[], object]:
        """Train until the interrupted part; returns that."""
        self.train(0, BEFORE)
        if self.case.part == "microbatches":
            return lambda: self.microbatches(BEFORE)
        if self.case.part == "forward":
            return lambda: self.forward(BEFORE)
        if self.case.part == "save":
            return self.saved
        self.forward(BEFORE)
        if self.case.part == "backward":
            return lambda: self.loss.backward()
        self.loss.backward()
        return self.optimizer.step

    def saved(self) -> Any:
        """Copies of the state dicts."""
        return copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()))

    def go_on(self) -> Any:
        """Train on and look at everything; returns the state dicts before and after it."""
        self.loss = None
        self.optimizer.zero_grad()
        now = self.saved()
        micro = [t for t in threading.enumerate() if t.name.startswith("grass-micro-batch")]
        for thread in micro:
            thread.join(LIMIT)
        if self.stream is not None:
            self.stream._prefetcher._executor.drain()
        assert all(p.grad is None for p in self.model.parameters()), "a gradient has come after zero_grad()"
        self.train(BEFORE + 1, AFTER)
        after = self.saved()
        held = {p for group in self.optimizer.param_groups for p in group["params"]}
        assert held == {p for p in self.model.parameters() if p.requires_grad}, "the optimizer holds other parameters"
        for layer in self.model.modules():
            if isinstance(layer, CompactLayer):
                assert layer.holds_active(), "weight and active rows differ"
        return now, after

    def close(self) -> None:
        """Let go of threads and files."""
        if self.stream is not None:
            self.stream.close()
            if self.directory is not None:
                self.directory.cleanup()


@functools.cache
def exits(code: CodeType) -> frozenset[int]:
    """Where code leaves a ``with``: signals are handled after calls, so none comes between its last line and here."""
    steps = list(dis.get_instructions(code))
    nones = [step.opname == "LOAD_CONST" and step.argval is None for step in steps]
    return frozenset(step.offset for i, step in enumerate(steps) if nones[i : i + 3] == [True] * 3)


def at_line(number: int, work: Callable[[], object]) -> tuple[list[str], BaseException | None]:
    """Interrupt work at the n-th line of the package's that this thread comes to.

    Returns:
        The lines until then, and what work has raised.
    """
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        if event == "line" and frame.f_lasti not in exits(frame.f_code):
            lines.append(f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}")
            if len(lines) == number:
                raise KeyboardInterrupt
        return trace

    outer, error = sys.gettrace(), None
    gc.disable()  # finalizers of earlier loops would run traced lines, and hide an interrupt
    sys.settrace(trace)
    try:
        work()
    except BaseException as raised:
        error = raised
    finally:
        sys.settrace(outer)
        gc.enable()
    return lines, error


class References:
    """What a loop comes to that was not interrupted, with the part and without it."""

    def __init__(self, case: Case) -> None:
        self.ends = []
        for with_part in (True, False):
            loop = Loop(case)
            part = loop.prepare()
            if with_part:
                part()
            self.ends.append(loop.go_on())
            loop.close()
        loop = Loop(case)
        self.lines = at_line(0, loop.prepare())[0]
        loop.close()

    def numbers(self) -> list[int]:
        """Where to interrupt: at the first, the second and the last time that each line runs."""
        times: dict[str, list[int]] = {}
        for number, line in enumerate(self.lines, 1):
            times.setdefault(line, []).append(number)
        return sorted({number for found in times.values() for number in (*found[:2], found[-1])})


def attempt(case: Case, number: int, references: References) -> tuple[str, str]:
    """Interrupt a loop at a line and go on; returns the outcome, and the line with what was seen."""
    result: list[tuple[str, str]] = []
    lines = [""]

    def run() -> None:
        loop = Loop(case)
        lines[:], error = at_line(number, loop.prepare())
        if error is not None and not isinstance(error, KeyboardInterrupt):
            result.append((WRONG, f"raised {error!r}"))
        else:
            result.append(_outcome(loop, references))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    outcome, seen = result[0] if result else (HANG, "")
    return outcome, f"{lines[-1]}: {seen}"


def _outcome(loop: Loop, references: References) -> tuple[str, str]:
    try:
        end = loop.go_on()
    except RuntimeError as raised:
        return (ERROR if "load a checkpoint" in str(raised) else WRONG), repr(raised)
    except Exception as raised:
        return WRONG, repr(raised)
    if any(same(end, reference) for reference in references.ends):
        return EXACT, ""
    tensors = zip(end[1][0].values(), references.ends[0][1][0].values(), strict=True)
    near = all(torch.isfinite(a.float()).all() and (a.float() - b.float()).abs().max() < 1 for a, b in tensors)
    return (MIXED, "") if near else (WRONG, "weights are far off")


def outcomes(case: Case, times: int | None = None) -> tuple[Counter[str], list[str]]:
    """Interrupt a case at every line, or about so many; counts the outcomes, and tells of those that are not exact."""
    references = References(case)
    numbers = references.numbers()
    every = 1 if times is None else max(1, len(numbers) // times)
    counts: Counter[str] = Counter()
    seen = []
    for number in numbers[::every]:
        outcome, what = attempt(case, number, references)
        counts[outcome] += 1
        if outcome != EXACT:
            seen.append(f"{case}: line {number}: {outcome}: {what}")
    return counts, seen
