"""A batch on unlike machines, beside its even split, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grass.machine.division import Division, check_batch, divide, divide_evenly
from grass.memory.table import aligned, heading
from grass.memory.uneven import Rank, Way
from grass.memory.units import format_bytes


def render(name: str, ranks: Sequence[Rank], batch: int) -> str:
    """The division of a batch, what it takes on each rank, and the even split beside it.

    Raises:
        ValueError: the batch is smaller than the number of ranks, or no memory can hold it.
    """
    check_batch(batch, len(ranks))
    profiles = [rank.profile(batch - len(ranks) + 1) for rank in ranks]
    division, even = divide(profiles, batch), divide_evenly(profiles, batch)
    rows = [["", *(f"rank {i}" for i in range(len(ranks)))], *_rows(ranks, division, "")]
    rows.append(["memory of the device", *(format_bytes(rank.memory) for rank in ranks)])
    rows += [] if even is None else _rows(ranks, even, "evenly: ")
    machines = [f"rank {i}: {rank.name}, {_source(rank)}" for i, rank in enumerate(ranks)]
    what = heading(name, ranks[0].model, replace(ranks[0].setting, batch_size=batch), None)
    notes = [
        f"{batch} samples, {_step(ranks, division, even)}.",
        "Seconds are predicted: of forwards and backwards, and where the model is streamed of copies and updates too.",
        "What ranks send each other is not counted.",
    ]
    return "\n".join([what, *machines, "", *aligned(rows), "", *notes])


def _rows(ranks: Sequence[Rank], division: Division, label: str) -> list[list[str]]:
    """What each rank does and takes."""
    ways, seconds = _ways(ranks, division), _seconds(ranks, division)
    return [
        [f"{label}samples of a micro-batch", *map(str, division.sizes)],
        [f"{label}model", *map(str, ways)],
        [f"{label}--cache", *("-" if way.units is None else format_bytes(way.setting.cache) for way in ways)],
        [f"{label}memory", *(format_bytes(way.plan.total) for way in ways)],
        [f"{label}memory of the host", *(format_bytes(way.plan.on_host) if way.plan.on_host else "-" for way in ways)],
        [f"{label}step, s", *(f"{one:.3g}" for one in seconds)],
    ]


def _ways(ranks: Sequence[Rank], division: Division) -> list[Way]:
    """How each rank trains its micro-batches, which fit, because the division is one of its profiles."""
    ways = (rank.way(size) for rank, size in zip(ranks, division.sizes, strict=True))
    return [way for way in ways if way is not None]


def _seconds(ranks: Sequence[Rank], division: Division) -> list[float]:
    """The step of each rank, where ``division.seconds`` may be interpolated."""
    return [division.micro_batches * way.seconds for way in _ways(ranks, division)]


def _step(ranks: Sequence[Rank], division: Division, even: Division | None) -> str:
    """The slowest rank's step, and the even split's."""
    step = max(_seconds(ranks, division))
    text = f"{division.micro_batches} micro-batches: {step:.3g} s"
    if even is None:
        samples = sum(division.sizes) * division.micro_batches
        why = "does not fit" if samples % len(ranks) == 0 else f"cannot divide {samples} samples among {len(ranks)}"
        return f"{text}; the even split {why}"
    evenly = max(_seconds(ranks, even))
    return f"{text}; evenly {even.micro_batches} micro-batches: {evenly:.3g} s, {evenly / step:.3g} times as long"


def _source(rank: Rank) -> str:
    return "by its rates" if rank.measured is None else "by times of the resident model that were measured"
