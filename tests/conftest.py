"""Shared fixtures: seeds, a tiny LLaMA and its token batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when grass.kernels is imported

# The same examples on every run, and no limits of time: a machine shared with other jobs stalls now and then.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=40,
)
hypothesis.settings.load_profile("repeatable")

# The matrices are tiny: a second thread costs more than it brings, much more where other jobs run beside.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

VOCABULARY = 64

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "study"), str(SCRIPTS / "bench")]  # as if the scripts there were run
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # for processes


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever soaks is slow."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., torch.nn.Module]:
    """A factory of small LLaMAs with tall, wide and square weights; equal ones for equal arguments."""
    transformers = pytest.importorskip("transformers")

    def build(seed: int = 0, layers: int = 2, **overrides: object) -> torch.nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
            **overrides,
        )
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)

    return build


@pytest.fixture(scope="session")
def token_batches() -> list[torch.Tensor]:
    """Fifty batches (4, 16) of a learnable sequence: each token is its predecessor plus a step of the row's own."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (50, 4, 1), generator=generator)
    strides = torch.randint(1, 5, (50, 4, 1), generator=generator)
    return list((starts + strides * torch.arange(16)) % VOCABULARY)
