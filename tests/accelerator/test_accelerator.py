"""Runs the files ``on_*.py`` of this folder, each in a process of its own that has the stand-in accelerator."""

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
QUICK = ("on_device.py",)
LONGER = ("on_fuzz.py", "on_interrupts.py", "on_ranks.py", "on_training.py")
ONLY_SOAK = ("on_memory.py",)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_on_the_stand_in(name: str) -> None:
    _run(name, "not slow")


def test_no_file_is_forgotten() -> None:
    assert sorted((*QUICK, *LONGER, *ONLY_SOAK)) == FILES


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_many_seeds_on_the_stand_in(name: str) -> None:
    _run(name, "slow")


def _run(name: str, mark: str) -> None:
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=on_*.py", "-m", mark]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode in (0, NO_TESTS), done.stdout[-8000:] + done.stderr[-4000:]
