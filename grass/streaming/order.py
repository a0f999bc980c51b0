"""Which unit is used when: recorded while it happens, and taken to happen again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


class Use(NamedTuple):
    """One use of one unit.

    Attributes:
        unit: its number.
        kind: forward with gradients, backward (which runs the forward again), or inference.
    """

    unit: int
    kind: str

    def ends_a_batch(self, following: Use) -> bool:
        """Whether the optimizer may step between this use and the following one."""
        return self.kind == BACKWARD and following.kind != BACKWARD


class Order:
    """What followed on each use the last time.

    Before that is known: forward through the units, back, and again; inference through the units, and again.

    Args:
        count: the number of units.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._followers: dict[Use, Use] = {}
        self._last: Use | None = None

    def note(self, use: Use) -> None:
        """Record a use. Several of one kind in a row count as one."""
        if self._last is not None and self._last != use:
            self._followers[self._last] = use
        self._last = use

    def ahead(self, use: Use) -> Iterator[tuple[int, bool]]:
        """The units in the order of their next use, from ``use`` on, each once.

        Yields:
            The unit, and whether the optimizer may step before.
        """
        seen, stepped = {use.unit}, False
        yield use.unit, stepped
        for _ in range(4 * self._count):  # a forward, a backward, and the forward after them
            following = self._following(use)
            stepped = stepped or use.ends_a_batch(following)
            use = following
            if use.unit not in seen:
                seen.add(use.unit)
                yield use.unit, stepped

    def _following(self, use: Use) -> Use:
        known = self._followers.get(use)
        if known is not None:
            return known
        last = self._count - 1
        if use.kind == BACKWARD:
            return Use(use.unit - 1, BACKWARD) if use.unit else Use(0, FORWARD)
        if use.unit < last:
            return Use(use.unit + 1, use.kind)
        return Use(last, BACKWARD) if use.kind == FORWARD else Use(0, INFERENCE)
