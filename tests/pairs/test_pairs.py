"""Every pair of features trains as each of them does, or raises the error that the documentation names."""

from __future__ import annotations

import pytest

from tests.pairs.features import ON_RANKS
from tests.pairs.outcomes import Pair, expected, outcome, pairs


def parameters() -> list:
    """Pairs with processes take seconds, those with compilers more."""

    def marks(pair: Pair) -> list[pytest.MarkDecorator]:
        if "compile" in pair:
            return [pytest.mark.soak]
        return [pytest.mark.slow] if {*ON_RANKS} & set(pair) else []

    return [pytest.param(pair, id=", ".join(pair), marks=marks(pair)) for pair in pairs()]


@pytest.mark.parametrize("pair", parameters())
def test_a_pair(pair: Pair) -> None:
    found = outcome(pair)
    assert found.answer == expected()[pair], found.message


def test_the_file_has_every_pair() -> None:
    assert set(expected()) == set(pairs())


def test_what_cannot_be_combined_says_so() -> None:
    """Errors of torch's own are those of two ways of dividing the same weights."""
    torchs = {pair[1:] for pair, answer in expected().items() if answer.startswith("torch")}
    assert torchs == {("DDP", "FSDP2"), ("DDP", "TP"), ("DDP", "2D"), ("FSDP2", "2D")}
