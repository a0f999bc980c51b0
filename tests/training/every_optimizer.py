"""Names of all optimizers of the scripts, as parameters of tests."""

import pytest

from training.run.optimizers import OPTIMIZERS

LONG = ("adamw8bit", "muon")
"""One compiles its step, one multiplies matrices in bfloat16, for which few CPUs have instructions."""
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in OPTIMIZERS]
