"""``scripts/bench/slow_link.py`` where it may not make networks; where it may, it leaves none behind."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench" / "slow_link.py"))


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("error", [FileNotFoundError("ip"), subprocess.CalledProcessError(1, "ip")], ids=type)
def test_skips_with_a_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*words: str) -> None:
        raise error

    monkeypatch.setitem(SCRIPT["join"].__globals__, "command", refuse)
    monkeypatch.setattr(sys, "argv", ["slow_link.py", "--csv", str(tmp_path / "slow.csv")])
    SCRIPT["main"]()
    assert "Skipped: network namespaces cannot be made here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_removes_what_it_made() -> None:
    class Failure(Exception): ...

    def fail() -> Any:
        with SCRIPT["two_namespaces"]() as made:
            if not made:
                pytest.skip("network namespaces cannot be made here")
            assert all(name in names() for name in made)
            raise Failure

    before = names() if shutil.which("ip") else ""
    with pytest.raises(Failure):
        fail()
    assert names() == before
