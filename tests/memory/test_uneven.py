"""A batch on unlike machines: each takes the fastest way that fits, the division is the best of all, wrong input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grass.machine.division import divide
from grass.machine.profile import Profile
from grass.machine.rates import Machine
from grass.memory import METHODS, Architecture, Setting, plan
from grass.memory.__main__ import main
from grass.memory.duration import flops_per_token
from grass.memory.streaming import step_seconds, visiting
from grass.memory.uneven import CONTEXT, Rank, read_rank

SETTING = Setting(rank=64, seq_len=128, chunk_tokens=0, slack=0)
BIG = Machine(4e9, 2.5e9, 2.5e9, 5e10, "a big machine", 3e12, 10**9 + CONTEXT)
SMALL = replace(BIG, name="a small machine", compute_rate=1e12, memory=4 * 10**8 + CONTEXT)


@pytest.fixture(scope="module")
def model() -> Architecture:
    """Eight blocks, 116 MB in bfloat16."""
    from grass.memory.models import load_architecture

    return load_architecture("60m")


def rank(model: Architecture, machine: Machine = BIG, memory: int = 10**9, measured: Profile | None = None) -> Rank:
    return Rank(machine, model, SETTING, memory, measured=measured)


def test_resident_where_it_fits(model: Architecture) -> None:
    setting = replace(SETTING, batch_size=4)
    needed = plan("Grass", model, setting)
    way = rank(model, memory=needed.total).way(4)
    assert way is not None
    assert (way.units, way.plan) == (None, needed)
    assert way.seconds == pytest.approx(setting.tokens * flops_per_token("Grass", model, setting) / BIG.compute_rate)


def test_else_streamed_with_the_largest_cache(model: Architecture) -> None:
    streams = replace(SETTING, batch_size=4, offload=True, stream=True)
    held = METHODS["Grass"](model, streams)
    unit, least = visiting(held, model, streams).nbytes, plan("Grass", model, streams).total
    for room in (0, 2, 3.5):
        way = rank(model, memory=least + round(room * unit)).streamed(4)
        assert way is not None
        assert way.setting == replace(streams, cache=int(room) * unit)
        assert way.units == (3 + int(room), 8)
        assert way.plan == plan("Grass", model, way.setting)
        assert way.seconds == step_seconds("Grass", held, model, way.setting, BIG)
    everything = rank(model, memory=10**9).streamed(4)
    assert everything is not None
    assert (everything.units, everything.setting.cache) == ((8, 8), 5 * unit)
    assert rank(model, memory=least - 1).way(4) is None


def test_without_checkpointing_nothing_streams(model: Architecture) -> None:
    one = replace(rank(model, memory=2 * 10**8), setting=replace(SETTING, checkpointing=False))
    assert one.way(1) is None


def test_host_memory_limits_streaming(model: Architecture) -> None:
    memory = plan("Grass", model, replace(SETTING, batch_size=4)).total - 1
    assert replace(rank(model, memory=memory), host=10**6).way(4) is None


def test_the_division_is_the_best_of_all(model: Architecture) -> None:
    """Against all sizes and numbers of micro-batches, with the exact times of each."""
    ranks = [rank(model), rank(model, SMALL, plan("Grass", model, replace(SETTING, batch_size=2)).total)]
    batch = 12
    assert ranks[1].resident(3) is None
    assert ranks[1].streamed(3) is not None
    found = divide([one.profile(batch - 1) for one in ranks], batch)
    ways = [{size: one.way(size) for size in range(1, batch)} for one in ranks]
    every = [
        count * max(first.seconds, second.seconds)
        for count in (1, 2, 3, 4, 6)
        for size in range(1, batch // count)
        if (first := ways[0][size]) and (second := ways[1][batch // count - size])
    ]
    assert found.step == pytest.approx(min(every), rel=1e-9)
    assert found.sizes[0] > found.sizes[1]


def test_measured_times_take_the_place_of_rates(model: Architecture) -> None:
    measured = Profile("", {1: 0.5, 2: 0.9, 4: 1.7}, 4, BIG)
    one = rank(model, measured=measured)
    way = one.way(4)
    assert way is not None
    assert way.seconds == 1.7
    flops = 4 * SETTING.seq_len * flops_per_token("Grass", model, SETTING)
    assert one.rates.compute_rate == pytest.approx(flops / 1.7)
    streamed = one.streamed(4)
    assert streamed is not None
    assert streamed.seconds > 1.0  # computes at the rate that was reached, not at that of a large product
    with pytest.raises(ValueError, match="another model or sequence length: 4 samples of this one in 1e-06 s need"):
        rank(model, measured=Profile("", {4: 1e-6}, 4, BIG)).way(1)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    main(["--model", "60m", "--rank", "64", "--seq", "128", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return {line[:33].strip(): line[33:].split() for line in lines}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Architecture) -> None:
    BIG.save(tmp_path / "a.json")
    Profile(SMALL.name, {1: 0.1, 8: 0.7}, 8, SMALL).save(tmp_path / "b.json")
    files = [flag for name in "ab" for flag in ("--machine", str(tmp_path / f"{name}.json"))]
    rows = command(capsys, *files, "--batch", "16")
    sizes, even = ([int(n) for n in rows[f"{label}samples of a micro-batch"]] for label in ("", "evenly: "))
    assert sizes[0] > sizes[1] > 0
    assert even[0] == even[1]
    assert rows["memory of the device"] == ["1.00", "GB", "0.40", "GB"]
    steps, evenly = ([float(s) for s in rows[f"{label}step, s"]] for label in ("", "evenly: "))
    assert max(steps) < max(evenly)
    setting = replace(Setting(rank=64, seq_len=128), batch_size=sizes[0])
    assert float(rows["memory"][0]) == pytest.approx(plan("Grass", model, setting).total / 1e9, abs=0.005)
    assert command(capsys, *files, "--gpu", "0.7GB")["memory of the device"] == ["0.70", "GB"] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--batch", "1"], "Invalid batch=1: must be at least the number of ranks, 2"),
        (["--gpu", "1MB"], "Not one sample fits on rank 0 (largest micro-batches: [0, 0])"),
        (["--batch", "100003", "--gpu", "200MB"], "Cannot divide batch=100003 among 2 ranks whose largest micro-batch"),
        (["--stream"], "With several --machine the plan says what each of them streams"),
    ],
)
def test_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], error: str
) -> None:
    BIG.save(tmp_path / "a.json")
    with pytest.raises(SystemExit):
        command(capsys, *["--machine", str(tmp_path / "a.json")] * 2, *arguments)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (replace(BIG, memory=0), "does not say how much memory 'a big machine' has: add --gpu"),
        (replace(BIG, compute_rate=float("inf")), "does not say how fast 'a big machine' computes"),
        (Profile("", {1: 1.0}, 1), "has no rates beside its times"),
        (Profile("", {}, 0, BIG), "or no times"),
    ],
)
def test_files_that_do_not_say_enough(
    tmp_path: Path, model: Architecture, stored: Machine | Profile, error: str
) -> None:
    path = tmp_path / "a.json"
    stored.save(path)
    with pytest.raises(ValueError, match=error):
        read_rank(path, model, SETTING, None, None)


def test_a_file_of_something_else(tmp_path: Path, model: Architecture) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="does not hold the times of a rank"):
        read_rank(tmp_path / "a.json", model, SETTING, None, None)
