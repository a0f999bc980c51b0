"""Curves of a sweep as a picture and in TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grass.sweep import run
from grass.sweep.plot import plot_curves
from tests.sweep import trials

pytestmark = pytest.mark.usefixtures("fast")
ENDS = ["error", "not finite", "all of them"]


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    run(trials.ends, {"how": ENDS}, out=tmp_path, steps=4, tensorboard=True)
    return tmp_path


def test_tensorboard_has_curves_and_settings(swept: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for again in range(2):
        found = {}
        for log in (swept / "tensorboard").iterdir():
            events = reader.EventAccumulator(str(log))
            events.Reload()
            found[log.name.rpartition("-")[0]] = [(e.step, e.value) for e in events.Scalars("loss")]
            (last,) = events.Scalars("last step")
            assert last.value == found[log.name.rpartition("-")[0]][-1][0]
            assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")
        assert found["how=error"] == [(1, 1.0), (2, 0.5)]
        assert [step for step, _ in found["how=all_of_them"]] == [1, 2, 3, 4]
        assert len(found) == 3
        if not again:  # the same command again changes nothing
            run(trials.ends, {"how": ENDS}, out=swept, steps=4, tensorboard=True)


def test_a_picture_of_all_curves(swept: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_curves(list(swept.glob("*.jsonl")), swept / "curves.png") == 3
    assert (swept / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_they_lack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="No loss is in the journals"):
        plot_curves([], tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard=True needs tensorboard: pip install tensorboard"):
        run(trials.ends, {"how": ENDS}, out=tmp_path / "out", steps=4, tensorboard=True)
    assert not (tmp_path / "out").exists()
