"""Sweeps: tables, endings, devices, and what is refused."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

import grass
from grass.sweep import Behind, devices, run
from grass.sweep.devices import claim_name
from grass.sweep.grid import Kind, described
from grass.sweep.journal import Journal
from grass.sweep.lock import Lock
from grass.sweep.pool import Sweep
from grass.sweep.worker import follow
from tests.sweep import trials

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("fast")


def only(path, pattern):
    """The one file that matches."""
    (found,) = path.glob(pattern)
    return found


def solo(tmp_path):
    """The table that trials give that run one after another in this process."""
    rows = []
    for i, (lr, scale) in enumerate((lr, scale) for lr in trials.GRID["lr"] for scale in trials.GRID["scale"]):
        folder = tmp_path / f"solo{i}"
        folder.mkdir()
        step, loss = list(trials.train(lr, scale, folder=folder, device="cpu"))[-1]
        rows.append({"lr": lr, "scale": scale, "end": "done", "step": step, "loss": loss, "message": None})
    return rows


def test_trials_equal_solo_runs_and_are_not_run_again(tmp_path) -> None:
    table = run(trials.train, trials.GRID, out=tmp_path / "out", steps=trials.STEPS, devices=["cpu:0", "cpu:1"])
    assert table == solo(tmp_path)
    assert list(pd.DataFrame(table)["end"]) == ["done"] * 4
    journals = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.jsonl")}
    assert run(trials.train, trials.GRID, out=tmp_path / "out", steps=trials.STEPS) == table
    assert {path: path.read_bytes() for path in (tmp_path / "out").glob("*.jsonl")} == journals


def test_killed_trials_go_on(tmp_path) -> None:
    trial = trials.killed_at(0.2, seed=1)
    assert run(trial, trials.GRID, out=tmp_path / "out", steps=trials.STEPS) == solo(tmp_path)
    assert len(list((tmp_path / "out").glob("*.files/killed"))) >= 2


@pytest.mark.soak
def test_sweeps_killed_at_random_moments_go_on(tmp_path) -> None:
    """Ten times, with trials that start as users' do."""
    out, rng = tmp_path / "out", random.Random(0)

    def steps() -> int:
        return sum(path.read_text().count('"step"') for path in out.glob("*.jsonl"))

    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-m", "tests.sweep.trials", str(out)], cwd=ROOT)
        enough = steps() + rng.randint(0, 4)
        while steps() < enough and process.poll() is None:
            time.sleep(rng.random() / 20)
        process.kill()
        process.wait()
    assert trials.sweep(out) == solo(tmp_path)
    assert not any('"died"' in path.read_text() for path in out.glob("*.jsonl"))


def test_a_checkpoint_behind_the_last_loss_is_named(tmp_path) -> None:
    """The trial saved, was killed before it could yield, and goes on after the step whose loss is missing."""
    path = tmp_path / "trial.jsonl"
    Journal(path).append(step=2, loss=1.0)
    ended = follow((pair for pair in ()), Journal(path), [], 4, None)
    assert ended["end"] == "error"
    assert ended["message"].startswith("The trial yielded step 2 last, not 4. It was interrupted before: if its ")


def test_endings(tmp_path) -> None:
    ways = ["done", "not finite", "out of memory", "host memory", "error", "short", "exit", "killed", "killed once"]
    table = run(trials.ends, {"how": ways}, out=tmp_path, steps=4)
    rows = {row["how"]: row for row in table}
    assert {how: (row["end"], row["step"]) for how, row in rows.items()} == {
        "done": ("done", 4),
        "not finite": ("not finite", 3),
        "out of memory": ("out of memory", 2),
        "host memory": ("out of memory", 2),
        "error": ("error", 2),
        "short": ("error", 2),
        "exit": ("error", 2),
        "killed": ("error", 2),
        "killed once": ("done", 4),
    }
    assert math.isnan(rows["not finite"]["loss"])
    assert rows["error"]["message"] == "KeyError: 'pretended'"
    assert rows["short"]["message"] == "The trial yielded step 2 last, not 4"
    assert rows["exit"]["message"] == "Its process died 2 times, the last time with exit code 0"
    assert rows["killed"]["message"] == "Its process died 2 times, the last time by SIGKILL"
    log = only(tmp_path, "how=error-*.log").read_text()
    assert "this one ends error" in log
    assert "Traceback" in log


def test_retry_runs_failed_trials_again(tmp_path) -> None:
    failed = run(trials.mended, [{}], out=tmp_path, steps=1)
    assert failed == [{"end": "error", "step": None, "loss": None, "message": "ValueError: pretended"}]
    assert run(trials.mended, [{}], out=tmp_path, steps=1) == failed
    assert run(trials.mended, [{}], out=tmp_path, steps=1, retry=True)[0]["end"] == "done"


def test_a_full_disk_loses_nothing(tmp_path) -> None:
    table = run(trials.fills_the_disk, [{}], out=tmp_path, steps=2)
    assert table == [{"end": "done", "step": 2, "loss": 0.25, "message": None}]
    assert only(tmp_path, "*.jsonl").read_text().count('"died": 1') == 1


def test_an_unfinished_line_is_not_there(tmp_path) -> None:
    journal, reader = Journal(tmp_path / "journal"), Journal(tmp_path / "journal")
    journal.append(step=1, loss=0.5)
    with journal.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert reader.read().losses == {1: 0.5}
    Journal(journal.path).append(step=3, loss=0.1)
    assert reader.read().losses == Journal(journal.path).read().losses == {1: 0.5, 3: 0.1}


def test_trials_that_are_behind_stop(tmp_path) -> None:
    grid = {"level": [1.0, 1.04, 1.06, 0.9]}
    stop = Behind(0.05, after=0.5)
    table = run(trials.follows, grid, out=tmp_path, steps=10, stop=stop)
    assert [(row["end"], row["step"]) for row in table] == [
        ("done", 10),
        ("done", 10),
        ("behind", 5),
        ("done", 10),
    ]
    grid = {"level": [1.0, 1.04, 1.06]}
    table = run(trials.follows, grid, out=tmp_path, steps=10, stop=Behind(0.2, after=0.5))
    assert [row["end"] for row in table] == ["done"] * 3


def test_a_rule_may_be_a_function(tmp_path) -> None:
    """Another process calls it by another address."""
    table = run(trials.follows, {"level": [0.5, 2.0]}, out=tmp_path, steps=3, stop=trials.above_one)
    assert [row["end"] for row in table] == ["done", "behind"]
    assert (
        len([line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines() if "start" in line])
        == 2
    )
    again = run(trials.follows, {"level": [0.5, 2.0]}, out=tmp_path, steps=3)
    assert [row["end"] for row in again] == ["done", "done"]


def test_objects_methods_and_functions_as_arguments_are_told_apart(tmp_path) -> None:
    """By what they say, not by an address, which another process would not know."""

    def name(trial: object) -> str:
        return Kind(trial, 3, tmp_path).place({}).stem

    one, two = trials.Level(1.0), trials.Level(2.0)
    each = [
        one,
        two,
        one.method,
        two.method,
        partial(trials.follows, level=math.sin),
        partial(trials.follows, level=math.cos),
    ]
    each += [partial(trials.follows, level=one), partial(trials.follows, level=two), trials.follows]
    assert len({name(trial) for trial in each}) == len(each)
    assert name(one) == name(trials.Level(1.0))
    assert name(partial(trials.follows, level=trials.Level(2.0).method)) == name(
        partial(trials.follows, level=two.method)
    )
    assert all(" at 0x" not in described(trial) for trial in each)
    rows = [run(trial, [{}], out=tmp_path, steps=2) for trial in (one, two, two.method)]
    assert [row["loss"] for (row,) in rows] == [1.0, 2.0, 2.0]


def test_two_devices_run_two_trials_at_once(tmp_path) -> None:
    """Each of them ends only if it sees the other."""
    table = run(trials.waits_for_the_other, {"name": ["a", "b"]}, out=tmp_path, steps=1, devices=["cpu:0", "cpu:1"])
    assert [row["end"] for row in table] == ["done", "done"]
    intervals = []
    for path in tmp_path.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert records[0]["start"] in ("cpu:0", "cpu:1")
        intervals.append((records[0]["time"], records[-1]["time"]))
    (_, first_end), (second_start, _) = sorted(intervals)
    assert second_start < first_end


def test_other_settings_are_kept_apart(tmp_path) -> None:
    run(trials.follows, {"level": [0.1]}, out=tmp_path, steps=10)
    run(trials.follows, {"level": [1.0]}, out=tmp_path, steps=9)
    table = run(trials.follows, {"level": [1.0, 1.01]}, out=tmp_path, steps=10, stop=Behind(after=0))
    assert [(row["level"], row["end"], row["step"]) for row in table] == [(1.0, "done", 10), (1.01, "done", 10)]
    run(partial(trials.follows, level=1.0), [{}], out=tmp_path, steps=10)
    assert len(list(tmp_path.glob("*.jsonl"))) == 5


def test_a_trial_of_another_command_is_left_to_it(tmp_path) -> None:
    kind = Kind(trials.follows, 3, tmp_path)
    place = kind.place({"level": 1.0})
    lock = Lock.take(place.path("lock"))
    with Sweep(kind, [{"level": 1.0}], ["cpu"]) as sweep:
        assert not sweep.turn()
        assert sweep.running == {"cpu": None}
        lock.release()
        sweep.turn()
        assert sweep.running["cpu"] is not None
        assert Lock.take(place.path("lock")) is None


def test_a_device_of_another_command_is_waited_for(tmp_path) -> None:
    with Sweep(Kind(trials.follows, 3, tmp_path), [{"level": 1.0}], ["cpu:1"]) as sweep:
        claim = Lock.take(tmp_path / "locks" / claim_name("cpu:1"))
        assert not sweep.turn()
        assert sweep.running == {"cpu:1": None}
        claim.release()
        sweep.turn()
        assert sweep.running["cpu:1"] is not None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "yielded nothing"),
        ("a number", "returned 3: a trial yields pairs"),
        ("single values", "yielded 0.5: a trial yields pairs"),
        ("texts", r"yielded \(1, 'low'\)"),
        ("from zero", "yielded step 0 after step 0: steps are counted from 1 and increase"),
        ("back", "yielded step 2 after step 2"),
    ],
)
def test_misuse_is_refused_and_can_be_mended(tmp_path, how, message) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"The trial misused with how={how} cannot be swept: it {message}"):
            run(trials.misused, {"how": [how]}, out=tmp_path, steps=3)


def local_trial():
    def trial(lr, *, folder, device):
        yield 1, lr

    return trial


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trial": local_trial()}, TypeError, r"local_trial\.<locals>\.trial cannot be pickled"),
        ({"trial": 3}, TypeError, "Invalid trial=3"),
        ({"trial": trials.ends}, TypeError, "ends does not take the arguments level, folder, device: .*how"),
        ({"grid": {"step": [1]}}, ValueError, "No setting can be called step"),
        ({"grid": {"level": []}}, ValueError, "The grid has no trials"),
        ({"grid": {"level": [1.0, 2.0, 1.0]}}, ValueError, r"trial \{'level': 1.0\} twice"),
        ({"grid": {"level": 1.0}}, TypeError, r"Invalid grid\['level'\]=1.0: must be a list"),
        ({"grid": {"level": [(1, 2)]}}, TypeError, r"Invalid setting level=\(1, 2\): must be a number"),
        ({"grid": {"level": [math.nan]}}, ValueError, "Invalid setting level=nan"),
        ({"steps": 0}, ValueError, "Invalid steps=0: must be an integer >= 1"),
        ({"devices": ["cpu", "warp:0"]}, ValueError, "Unknown device 'warp:0': this machine has cpu:N"),
        ({"devices": ["cuda:97"]}, ValueError, "Unknown device 'cuda:97'"),
        ({"devices": ["cpu", "cpu:0"]}, ValueError, "a name is there twice"),
        ({"devices": "cpu"}, ValueError, "Invalid devices='cpu': must be a list"),
        ({"devices": []}, ValueError, r"Invalid devices=\[\]"),
        ({"stop": 0.05}, TypeError, "Invalid stop=0.05"),
        ({"host": 0}, ValueError, "Invalid host=0: must be a number of bytes"),
        ({"host": "57"}, ValueError, "Invalid size '57'"),
    ],
)
def test_bad_arguments_are_named_before_anything_starts(tmp_path, changes, error, message) -> None:
    arguments = {"trial": trials.follows, "grid": {"level": [1.0]}, "steps": 3, "out": tmp_path / "out"} | changes
    with pytest.raises(error, match=message):
        run(arguments.pop("trial"), arguments.pop("grid"), **arguments)
    assert not (tmp_path / "out").exists()


def test_trials_that_do_not_fit_on_the_host_are_not_begun(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda: 150 * 10**9)
    grid, names = {"level": [1.0, 2.0, 3.0]}, ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(MemoryError, match=r"3 trials at a time take 171.* host memory, and 150.* free: 2 fit"):
        run(trials.follows, grid, out=tmp_path / "out", steps=1, devices=names, host="57GB")
    assert not (tmp_path / "out").exists()
    assert len(run(trials.follows, grid, out=tmp_path / "out", steps=1, devices=names[:2], host="57GB")) == 3
    assert len(run(trials.follows, {"level": [1.0]}, out=tmp_path / "out", steps=1, devices=names, host="57GB")) == 1


@pytest.mark.parametrize("arguments", [{"margin": -0.1}, {"margin": math.inf}, {"after": 1.5}])
def test_bad_rules_are_named(arguments) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(arguments))}="):
        Behind(**arguments)


def test_a_negative_best_loss_has_a_margin_too() -> None:
    assert not Behind(0.1, after=0)(1, 10, -0.95, [-1.0])
    assert Behind(0.1, after=0)(1, 10, -0.85, [-1.0])


def test_progress_has_a_line_for_each_trial(tmp_path, capsys) -> None:
    run(trials.follows, {"level": [1.0, 2.0]}, out=tmp_path, steps=3, progress=True)
    shown = capsys.readouterr().err
    assert "level=1.0: 100%" in shown
    assert "loss 2 done" in shown


UNGUARDED = """
import grass.sweep

def trial(lr, *, folder, device):
    yield 1, lr

grass.sweep.run(trial, {"lr": [1.0]}, out="out", steps=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "reason"),
    [(["script.py"], "A trial's process imports this script"), (["-c", UNGUARDED], "Can't get attribute 'trial'")],
    ids=["script", "typed"],
)
def test_trials_that_cannot_start_are_named(tmp_path, command, reason) -> None:
    """A script without the guard, and what is typed into Python."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "RuntimeError: The trial trial could not start in another process" in done.stderr


def test_it_is_imported_on_first_use() -> None:
    assert grass.sweep.run is run
