"""Lists cut into batches of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def of_one_kind(items: Iterable[T], kind: Callable[[T], object]) -> list[list[T]]:
    """Items of equal kind together, in the order of the first of each."""
    kinds: dict[object, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return list(kinds.values())


def batches(
    items: Iterable[T], size: Callable[[T], int], limit: int, kind: Callable[[T], object] = lambda item: None
) -> Iterator[list[T]]:
    """Batches of neighbouring items, in order.

    Args:
        items: what to divide.
        size: of one item.
        limit: largest total size of a batch; a larger item has a batch of its own.
        kind: only items of equal kind share a batch.
    """
    batch: list[T] = []
    total, kind_of_batch = 0, None
    for item in items:
        more, its_kind = size(item), kind(item)
        if batch and (total + more > limit or its_kind != kind_of_batch):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total, kind_of_batch = total + more, its_kind
    if batch:
        yield batch
