"""What each pair of features comes to, as ``outcomes.csv`` says and as a run shows."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tests.distributed.world import run_world
from tests.pairs.features import FEATURES, MODES, ON_RANKS, OTHER, TOLERANCE, Outcome, applies, run

FILE = Path(__file__).with_name("outcomes.csv")
Pair = tuple[str, str, str]
"""The mode and two features, or one of them twice: the feature alone."""


def pairs() -> list[Pair]:
    """Every pair that can be asked for."""
    every = itertools.product(MODES, itertools.combinations_with_replacement(FEATURES, 2))
    return [(mode, *two) for mode, two in every if applies(mode, two)]


def expected() -> dict[Pair, str]:
    """The answers in the file."""
    with FILE.open(newline="") as file:
        return {(row["mode"], row["feature"], row["beside"]): row["answer"] for row in csv.DictReader(file)}


def outcome(pair: Pair) -> Outcome:
    """Train with a pair: ``"equal"`` if a feature that changes no result has changed none, else ``"trains"``.

    Raises:
        AssertionError: the ranks differ, or results are not those without the features that change none.
    """
    mode, *two = pair
    features = tuple(dict.fromkeys(two))
    found = of_ranks(mode, features)
    assert len({each.answer for each in found}) == 1, [(each.answer, each.message) for each in found]
    if found[0].answer != "yes":
        return found[0]
    rest = tuple(name for name in features if name in OTHER)
    for each in found:
        assert_trained(each, plain(mode, rest))
    return replace(found[0], answer="trains" if len(rest) == len(features) else "equal")


def assert_trained(found: Outcome, without: Outcome) -> None:
    """The loss falls, and weights are those of a run without the features that change no result."""
    assert found.losses[-1] < found.losses[0]
    assert without.answer == "yes", without.message
    assert found.weights is not None
    assert without.weights is not None
    torch.testing.assert_close(found.weights, without.weights, **TOLERANCE)


@cache
def plain(mode: str, features: tuple[str, ...]) -> Outcome:
    """The outcome, of the first rank, without the features that change no result."""
    return of_ranks(mode, features)[0]


def of_ranks(mode: str, features: tuple[str, ...]) -> list[Outcome]:
    """The outcome in this process, or those of two ranks."""
    if not set(ON_RANKS) & set(features):
        return [run(mode, features)]
    return [Outcome(*values) for values in run_world(member, 2, mode, features)]


def member(rank: int, mode: str, features: tuple[str, ...]) -> tuple:
    """What a rank sends of its outcome."""
    found = run(mode, features)
    return found.answer, found.message, found.losses, found.weights
