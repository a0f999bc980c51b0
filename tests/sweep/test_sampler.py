"""Settings from an Optuna study."""

from __future__ import annotations

import sys

import pytest

from grass.sweep import Behind, run
from tests.sweep import trials

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)
pytestmark = pytest.mark.usefixtures("fast")
RATES = {"lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True), "scale": [0.5, 1.0]}


def study(path=None, **keywords):
    """A study whose proposals follow from its seed, in a file that lasts if there is a path."""
    storage = path and optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    return optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=2), storage=storage, study_name="rates", **keywords
    )


def test_it_is_told_what_solo_trials_give(tmp_path) -> None:
    """Against Optuna's own loop with the same sampler."""
    alone = study()

    def objective(proposed):
        lr = proposed.suggest_float("lr", 1e-3, 1e-1, log=True)
        scale = proposed.suggest_categorical("scale", [0.5, 1.0])
        folder = tmp_path / f"solo{proposed.number}"
        folder.mkdir()
        return list(trials.train(lr, scale, folder=folder, device="cpu"))[-1][1]

    alone.optimize(objective, n_trials=5)
    swept = study()
    table = run(trials.train, RATES, out=tmp_path / "out", steps=trials.STEPS, sampler=swept, trials=5)
    assert [(t.params, t.value) for t in swept.trials] == [(t.params, t.value) for t in alone.trials]
    assert [({"lr": row["lr"], "scale": row["scale"]}, row["loss"]) for row in table] == [
        (t.params, t.value) for t in alone.trials
    ]


def test_a_sweep_goes_on_with_a_study_that_lasts(tmp_path) -> None:
    """What was asked for and never told, because the sweep died, is run first."""
    first = study(tmp_path / "study")
    asked = [first.ask(dict.fromkeys(["level"], optuna.distributions.FloatDistribution(0.0, 1.0))) for _ in range(2)]
    again = study(tmp_path / "study", load_if_exists=True)
    space = {"level": optuna.distributions.FloatDistribution(0.0, 1.0)}
    table = run(trials.follows, space, out=tmp_path, steps=2, sampler=again, trials=3)
    assert [row["level"] for row in table[:2]] == [trial.params["level"] for trial in asked]
    assert [trial.value for trial in again.trials] == [row["loss"] for row in table]
    assert len(table) == 3
    assert run(trials.follows, space, out=tmp_path, steps=2, sampler=again, trials=3) == table
    assert len(run(trials.follows, space, out=tmp_path, steps=2, sampler=again, trials=4)) == 4


def test_endings_become_states(tmp_path) -> None:
    ends = study()
    for how in ("done", "error", "not finite", "killed once"):
        ends.enqueue_trial({"how": how})
    space = {"how": ["done", "error", "not finite", "killed once"]}
    run(trials.ends, space, out=tmp_path, steps=4, sampler=ends, trials=4)
    assert [trial.state.name for trial in ends.trials] == ["COMPLETE", "FAIL", "FAIL", "COMPLETE"]
    behind = study()
    for level in (0.1, 0.2):
        behind.enqueue_trial({"level": level})
    space = {"level": optuna.distributions.FloatDistribution(0.0, 1.0)}
    run(trials.follows, space, out=tmp_path, steps=4, sampler=behind, trials=2, stop=Behind())
    assert [trial.state.name for trial in behind.trials] == ["COMPLETE", "PRUNED"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sampler": 3}, TypeError, "Invalid sampler=3: must be an optuna.Study"),
        ({"trials": None}, ValueError, "Invalid trials=None: must be an integer >= 1"),
        ({"trials": 0}, ValueError, "Invalid trials=0"),
        ({"grid": [{"level": 1.0}]}, TypeError, "with sampler= it has a distribution or a list for each setting"),
        ({"grid": {"lr": [1.0]}}, TypeError, "does not take the arguments lr, folder, device"),
        ({"sampler": study(direction="maximize")}, ValueError, "must minimize one value"),
        ({"sampler": None}, ValueError, "Invalid trials=2: a grid has as many as it has"),
    ],
)
def test_bad_arguments_are_named(tmp_path, changes, error, message) -> None:
    arguments = {"grid": {"level": [1.0]}, "sampler": study(), "trials": 2} | changes
    with pytest.raises(error, match=message):
        run(trials.follows, arguments.pop("grid"), out=tmp_path / "out", steps=3, **arguments)
    assert not (tmp_path / "out").exists()


def test_without_optuna(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="sampler= needs optuna: pip install optuna"):
        run(trials.follows, {"level": [1.0]}, out=tmp_path, steps=3, sampler=object(), trials=1)
