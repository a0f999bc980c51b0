"""Lists cut into batches of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
