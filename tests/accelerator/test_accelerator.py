"""Runs the files ``on_*.py`` of this folder, each in a process of its own that has the stand-in accelerator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.standin import why_not
from tests.distributed.world import LIMIT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(path.name for path in HERE.glob("on_*.py"))
NO_TESTS = 5  # pytest's exit status
ONLY_SLOW = {"on_memory.py"}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize("name", [name for name in FILES if name not in ONLY_SLOW])
def test_on_the_stand_in(name: str) -> None:
    _run(name, "not slow")


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_many_seeds_on_the_stand_in(name: str) -> None:
    _run(name, "slow")


def _run(name: str, mark: str) -> None:
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=on_*.py", "-m", mark]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode in (0, NO_TESTS), done.stdout[-8000:] + done.stderr[-4000:]
