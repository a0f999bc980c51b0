"""The closed form of compact mode's memory against torch's memory tracker on fake tensors."""

import pytest
import torch

from grass.memory import estimate_llama
from grass.training.memory_tracking import track_compact_llama
from grass.training.models import llama_config

SETTINGS = [
    pytest.param("60m", {"rank": 64, "dim": 1, "seq_len": 2048}, id="60m-dim1"),
    pytest.param(
        "60m", {"rank": 64, "dim": 0, "seq_len": 1024, "active_dtype": torch.bfloat16}, id="60m-dim0-bf16-rows"
    ),
    pytest.param("60m", {"rank": 64, "seq_len": 512, "batch_size": 3, "dtype": torch.float32}, id="60m-fp32-batch3"),
    pytest.param("1b", {"rank": 256, "dim": 1, "seq_len": 2048}, id="1b", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "setting"), SETTINGS)
def test_estimate_matches_the_tracker(size, setting):
    config = llama_config(size, vocab_size=32_000, max_seq_len=setting["seq_len"])
    estimate, measured = estimate_llama(config, **setting), track_compact_llama(config, **setting)
    assert measured.parameters == estimate.weights + estimate.active_rows
    assert measured.gradients == estimate.gradients
    assert measured.state == estimate.state
    assert measured.activations == pytest.approx(estimate.activations, rel=0.001)  # a few scalars
    assert measured.peak == pytest.approx(estimate.peak, rel=0.01)
