"""Divisions of a batch: the greedy one is the best there is, for any monotone curves; errors name the values."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grass.machine.division import Division, divide, divide_evenly, fill
from grass.machine.profile import Profile
from grass.machine.rates import Machine

STEPS = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0])  # sums of these are exact, and often equal
CURVES = st.lists(st.lists(STEPS, min_size=1, max_size=7), min_size=2, max_size=4)


def profile(*seconds: float, largest: int = 0) -> Profile:
    return Profile("stand-in", dict(enumerate(seconds, 1)), largest or len(seconds))


@settings(max_examples=200, deadline=None)
@given(CURVES, st.data())
def test_fill_equals_brute_force(steps, data):
    """Curves that do not fall, convex or not."""
    curves = [[0.0, *accumulate(one, initial=0.25)][1:] for one in steps]
    most = [len(curve) for curve in curves]
    total = data.draw(st.integers(len(most), sum(most)))
    every = product(*(range(1, m + 1) for m in most))
    best = min(max(c[m - 1] for c, m in zip(curves, x, strict=True)) for x in every if sum(x) == total)
    sizes = fill([lambda m, c=curve: c[m - 1] for curve in curves], most, total)
    assert sum(sizes) == total
    assert all(1 <= size <= m for size, m in zip(sizes, most, strict=True))
    assert max(c[m - 1] for c, m in zip(curves, sizes, strict=True)) == best


@settings(max_examples=100, deadline=None)
@given(CURVES, st.integers(2, 24))
def test_divide_equals_brute_force(steps, batch):
    """Over the number of micro-batches too."""
    profiles = [profile(*accumulate(one[1:], initial=1 + one[0])) for one in steps]
    every = product(*(range(1, p.largest + 1) for p in profiles))
    times = [
        batch // sum(x) * max(p.predict(m) for p, m in zip(profiles, x, strict=True))
        for x in every
        if batch % sum(x) == 0
    ]
    if not times:
        with pytest.raises(ValueError, match=f"batch={batch}"):
            divide(profiles, batch)
        return
    found = divide(profiles, batch)
    assert found.batch == batch
    assert found.step == pytest.approx(min(times), rel=1e-8)


def test_three_times_as_fast_gets_three_times_as_much():
    fast, slow = profile(*range(1, 33)), profile(*range(3, 99, 3))
    assert divide([fast, slow], 16) == Division((12, 4), 1, (12.0, 12.0))
    assert divide_evenly([fast, slow], 16) == Division((8, 8), 1, (8.0, 24.0))


def test_memory_makes_micro_batches():
    fast, small = profile(*[2.0] * 6), profile(2, 2)  # a micro-batch of one takes as long as a larger one
    assert divide([fast, small], 16) == Division((6, 2), 2, (4.0, 4.0))
    assert divide_evenly([fast, small], 16) == Division((2, 2), 4, (8.0, 8.0))
    assert divide_evenly([fast, small], 15) is None


@pytest.mark.parametrize(
    ("batch", "largest", "error"),
    [
        (1, (4, 4), "Invalid batch=1: must be at least the number of ranks, 2"),
        (13, (4, 4), r"batch=13 among 2 ranks whose largest micro-batches are \[4, 4\]"),
        (4, (4, 0), r"Not one sample fits on rank 1 \(largest micro-batches: \[4, 0\]\)"),
    ],
)
def test_batches_that_cannot_be_divided(batch, largest, error):
    with pytest.raises(ValueError, match=error):
        divide([profile(*range(1, most + 1)) for most in largest], batch)


@pytest.mark.parametrize("batch", [16.0, True, "16"])
def test_batches_that_are_no_numbers(batch):
    with pytest.raises(TypeError, match="Invalid batch="):
        divide([profile(1.0)], batch)


def test_fill_has_limits():
    with pytest.raises(ValueError, match=r"Invalid total=9. Must be in 2 ... 8"):
        fill([float, float], [4, 4], 9)


def test_profile_is_interpolated_and_never_falls():
    found = Profile("", {1: 1.0, 2: 3.0, 4: 2.0, 8: 7.0}, 16)
    times = [found.predict(size) for size in range(13)]
    assert times == [0, 1, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert Profile("", {2: 1.0}, 8).predict(8) == 4
    assert found.scaled(2).predict(6) == 10


def test_profile_is_stored(tmp_path):
    rates = Machine(1.0, 2.0, 3.0, 4.0, "a machine", 5.0, 6)
    for found in (Profile("a machine", {1: 0.5, 2: 0.75}, 3), Profile("a machine", {1: 0.5}, 3, rates)):
        found.save(tmp_path / "a.json")
        assert Profile.read(tmp_path / "a.json") == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": "a", "seconds": {"x": 1}, "largest": 1}', "null"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="does not hold the times of a rank"):
        Profile.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("seconds", "largest", "error"),
    [
        ({1: 1.0}, -1, "Invalid largest=-1"),
        ({2: 1.0}, 1, "Invalid seconds={2: 1.0}"),
        ({1: 0.0}, 1, "Invalid seconds={1: 0.0}"),
        ({}, 1, "Must hold a time"),
    ],
)
def test_values_out_of_range(seconds, largest, error):
    with pytest.raises(ValueError, match=error):
        Profile("", seconds, largest)


def test_a_given_number_of_micro_batches():
    ranks = [profile(1.0, 2.0, 3.0, 4.0), profile(2.0, 4.0, 6.0, 8.0)]
    assert divide(ranks, 6).micro_batches == 1
    assert divide(ranks, 6, 2).sizes == (2, 1)
    with pytest.raises(ValueError, match="Cannot divide batch=12"):
        divide(ranks, 12, 1)


def test_the_plan_that_cephalo_has_published():
    """From its fitted times of a layer of GPT 2.7B: its sizes for 64 sequences (example/gpt_2.7b.json there)."""
    lines = {"l4": (18.361196, 6.024328), "a6000": (7.056488, 3.068228), "p40": (43.65419, 6.01005)}  # milliseconds
    times = [Profile(gpu, {1: sum(lines[gpu]), 64: 64 * lines[gpu][0] + lines[gpu][1]}, 64) for gpu in lines]
    found = divide([times[0], times[0], times[1], times[2]], 64)
    assert sorted(found.sizes) == sorted((13, 12, 34, 5))
    assert found.micro_batches == 1
