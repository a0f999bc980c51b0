"""Trainer collects garbage often: all that was imported before is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def frozen_imports() -> Iterator[None]:
    """A collection then takes milliseconds, not a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
