"""What fits: the largest rank, batch and sequence for which a plan stays within a device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grass.memory.architecture import Architecture
from grass.memory.planner import plan
from grass.memory.setting import Setting

RANK_STEP = 8
SEQUENCE_STEP = 128
LARGEST = 2**20
"""Beyond this batch or sequence nothing is looked for."""

WITHOUT_RANK = ("AdamW", "AdamW float32", "8-bit AdamW")
WITH_ADAPTERS = ("LoRA", "QLoRA")


@dataclass(frozen=True)
class Largest:
    """What fits with everything else as it is; ``None`` where nothing does, or where the method has no rank.

    Attributes:
        rank: a multiple of :data:`RANK_STEP`.
        batch_size: sequences.
        seq_len: tokens, a multiple of :data:`SEQUENCE_STEP`.
    """

    rank: int | None
    batch_size: int | None
    seq_len: int | None


def largest_that_fit(method: str, model: Architecture, setting: Setting, gpu: int, host: int | None = None) -> Largest:
    """The largest rank, batch and sequence, each on its own, with which ``method`` fits ``gpu`` and ``host`` bytes."""

    def fits(**changes: Any) -> bool:
        return plan(method, model, replace(setting, **changes)).fits(gpu, host)

    ranks = (setting.largest_rank(model) - (setting.explore if isinstance(setting.explore, int) else 0)) // RANK_STEP
    sequences = min(model.window or LARGEST, model.positions or LARGEST) // SEQUENCE_STEP
    name = "lora_rank" if method in WITH_ADAPTERS else "rank"
    return Largest(
        None if method in WITHOUT_RANK else last(lambda k: fits(**{name: k * RANK_STEP}), ranks, RANK_STEP),
        last(lambda k: fits(batch_size=k), LARGEST, 1),
        last(lambda k: fits(seq_len=k * SEQUENCE_STEP), sequences, SEQUENCE_STEP),
    )


def last(fits: Callable[[int], bool], end: int, step: int) -> int | None:
    """``step`` times the largest ``k`` in ``1..end`` that fits, where with one every smaller ``k`` does."""
    if end < 1 or not fits(1):
        return None
    low = 1
    while 2 * low <= end and fits(2 * low):  # from below: nothing large is traced that is far from fitting
        low *= 2
    high = min(2 * low, end + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step
