"""Lists cut into batches of limited size."""

import pytest

from grass.batches import batches


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], []),
        ([1, 2, 3], [[1, 2], [3]]),
        ([9, 1, 1, 1, 9], [[9], [1, 1, 1], [9]]),
        ([4, 1], [[4], [1]]),
    ],
    ids=str,
)
def test_batches_are_limited(items: list[int], expected: list[list[int]]) -> None:
    assert list(batches(items, int, limit=4 if 4 in items else 3)) == expected


def test_kinds_are_not_mixed() -> None:
    assert list(batches("aabba", lambda item: 1, 10, kind=str)) == [["a", "a"], ["b", "b"], ["a"]]
