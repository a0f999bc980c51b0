"""Processes that start fast: forked from one that has imported what they need."""

import multiprocessing

import pytest

from grass.sweep import pool

FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = [
    "tests.sweep.trials",
    "grass.sweep.language",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]


@pytest.fixture
def fast(monkeypatch):
    """Trials that do not import everything anew."""
    FORKSERVER.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(pool, "CONTEXT", FORKSERVER)
