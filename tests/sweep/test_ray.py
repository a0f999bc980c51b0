"""Trials under Ray Tune equal trials alone, and go on after a failure."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grass.sweep import for_ray
from tests.sweep import trials

pytestmark = pytest.mark.usefixtures("fast")
SETTINGS = [{"lr": lr, "scale": 1.0} for lr in trials.GRID["lr"]]


def alone(folder: Path, **settings: float) -> list[tuple[int, float]]:
    folder.mkdir()
    return list(trials.train(**settings, folder=folder, device="cpu"))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the part of Ray that runs in a trial's process is told."""
    found: list[dict[str, Any]] = []
    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="local"), trial_fs_path=tmp_path / "kept")
    context = SimpleNamespace(get_storage=lambda: storage, get_trial_dir=lambda: tmp_path / "elsewhere")
    tune: Any = ModuleType("ray.tune")
    tune.report, tune.get_context, tune.storage = found.append, lambda: context, storage
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    return found


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_it_reports_what_the_trial_yields(reports: list[dict[str, Any]], kind: str, tmp_path: Path) -> None:
    sys.modules["ray.tune"].storage.storage_filesystem.type_name = kind  # type: ignore[attr-defined]
    for_ray(trials.train)(dict(SETTINGS[0]))
    expected = alone(tmp_path / "alone", **SETTINGS[0])
    assert [(row["step"], row["loss"]) for row in reports] == expected
    assert (tmp_path / {"local": "kept", "s3": "elsewhere"}[kind] / "files" / "kept.pt").exists()


@pytest.mark.parametrize(
    ("how", "message"), [("nothing", "nothing"), ("back", "step 2 after step 2"), ("texts", "low")]
)
def test_misuse_is_named(reports: list[dict[str, Any]], how: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"The trial misused cannot be run: it yielded .*{message}"):
        for_ray(trials.misused)({"how": how})


def test_errors_are_the_trial_s_own(reports: list[dict[str, Any]]) -> None:
    with pytest.raises(KeyError, match="pretended"):
        for_ray(partial(trials.ends))({"how": "error"})
    assert [row["step"] for row in reports] == [1, 2]


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="Invalid trial=3: must be"):
        for_ray(3)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ImportError, match=r"grass.sweep.for_ray needs ray: pip install ray"):
        for_ray(trials.train)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_under_ray_itself(tmp_path: Path) -> None:
    """One of the trials fails half way and is started again by Ray."""
    import ray
    from ray import tune

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        retried = tune.RunConfig(
            storage_path=str(tmp_path / "ray"), verbose=0, failure_config=tune.FailureConfig(max_failures=1)
        )
        found = tune.Tuner(
            tune.with_resources(for_ray(trials.train_and_fail_once), {"cpu": 1}),
            param_space={"lr": tune.grid_search(trials.GRID["lr"]), "scale": 1.0},
            run_config=retried,
        ).fit()
    finally:
        ray.shutdown()
    assert len(found) == 2
    for result in found:
        settings = {"lr": result.config["lr"], "scale": 1.0}
        expected = alone(tmp_path / f"alone {settings['lr']}", **settings)
        assert (result.metrics["step"], result.metrics["loss"]) == expected[-1], settings
        assert (Path(result.path) / "files" / "kept.pt").exists()
