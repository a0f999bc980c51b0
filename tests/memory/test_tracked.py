"""The closed form against torch's memory tracker on fake tensors of full size."""

import copy

import pytest
import torch
from memory_tracking import track
from tracked_methods import BUILDERS

from grass.memory import METHODS, Architecture, Setting
from grass.memory.planner import peaks, plan
from tests.memory.architectures import CAPPED, KINDS, llama

WHOLE = {"checkpointing": False, "chunk_tokens": 0}
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
DENSE = ("Grass dense", "Grass in backward")  # their steps read contents, which fake tensors do not have
CASES = [
    pytest.param("Grass", llama("60m"), {"rank": 64}, id="60m", marks=SLOW),
    pytest.param("Grass", llama("60m"), {"rank": 64, **WHOLE}, id="60m-whole", marks=SOAK),
    pytest.param("Grass", llama("60m", 3), {"rank": 64, "dim": 0, "state_policy": "keep"}, id="60m-dim0-keep"),
    pytest.param("Grass", llama("60m", 3), {"rank": 0.25, "active_dtype": torch.bfloat16}, id="60m-bf16-rows"),
    pytest.param(
        "Grass", llama("60m", 3), {"rank": 64, "dtype": torch.float32, "batch_size": 3}, id="60m-fp32", marks=SLOW
    ),
    pytest.param("Grass", llama("60m", 3), {"rank": 64, "explore": 0}, id="60m-nothing-explored"),
    pytest.param(
        "Grass", llama("60m", 3), {"rank": 1 / 8, "explore": 3 / 8, **WHOLE}, id="60m-more-explored", marks=SLOW
    ),
    pytest.param(
        "Grass", llama("60m", 3), {"rank": 64, "explore": 1.0, "dim": 0}, id="60m-dim0-all-explored", marks=SLOW
    ),
    pytest.param("AdamW", llama("60m"), {**WHOLE, "chunk_tokens": 1000}, id="60m-adamw"),
    pytest.param("Grass", llama("350m", 3), {"checkpointing": False}, id="350m-wide", marks=SLOW),
    pytest.param("Grass", llama("1b", 3), {}, id="1b-wide", marks=SOAK),
    pytest.param("Grass", llama("13b", 4), {}, id="13b-wide", marks=SLOW),
    pytest.param("Grass", llama("13b", 3), {**WHOLE, "seq_len": 4096}, id="13b-wide-whole", marks=SOAK),
    pytest.param("AdamW", llama("13b", 3), {}, id="13b-wide-adamw", marks=SOAK),
    pytest.param("8-bit AdamW", llama("60m", 3), {}, id="60m-8bit", marks=SLOW),
    pytest.param("8-bit AdamW", llama("13b", 3), {}, id="13b-wide-8bit", marks=SOAK),
    pytest.param("LoRA", llama("60m", 3), {"lora_rank": 64}, id="60m-lora"),
    pytest.param("LoRA", llama("13b", 3), {}, id="13b-wide-lora", marks=SOAK),
    pytest.param(
        "LoRA",
        llama("60m", 3),
        {"lora_rank": 64, "active_dtype": torch.bfloat16, **WHOLE},
        id="60m-lora-bf16",
        marks=SLOW,
    ),
    pytest.param("GaLore", llama("60m", 3), {"rank": 64, **WHOLE}, id="60m-galore"),
    pytest.param("GaLore", llama("13b", 3), {}, id="13b-wide-galore", marks=SOAK),
    pytest.param("Grass int8", llama("13b", 3), {}, id="13b-wide-int8", marks=SLOW),
    pytest.param(
        "Grass int8", llama("60m", 3), {"rank": 64, "dim": 0, "state_policy": "keep"}, id="60m-int8-dim0-keep"
    ),
    pytest.param("Grass int8", KINDS["qwen3-moe"], {"rank": 32, "seq_len": 256}, id="qwen3-moe-int8", marks=SLOW),
    pytest.param("Grass", KINDS["qwen3-moe"], {"rank": 32, "dim": 0, "seq_len": 256}, id="qwen3-moe-dim0", marks=SLOW),
    *(
        pytest.param(
            method,
            KINDS[kind],
            {"rank": 32, "batch_size": 2, "seq_len": 256, **options},
            id=f"{kind}-{method}",
            marks=SLOW if method == "Grass" else SOAK,
        )
        for kind in KINDS
        for method, options in (
            ("Grass", {"checkpointing": False, "chunk_tokens": 0 if kind == CAPPED else 128}),
            ("AdamW", WHOLE),
        )
    ),
    *(
        pytest.param(
            method, llama(size), {}, id=f"{size}-{method}-full", marks=SLOW if size + method == "13bGrass" else SOAK
        )
        for size in ("350m", "1b", "7b", "13b")
        for method in BUILDERS
        if method not in DENSE
    ),
]


def tracked(options):
    """The paper's policy unless a case names another."""
    return Setting(**{"state_policy": "reset", **options})


@pytest.mark.parametrize(("method", "config", "options"), CASES)
def test_plan_equals_what_the_tracker_counts(method, config, options):
    setting, model = tracked(options), Architecture.from_config(config)
    planned, measured = plan(method, model, setting), track(method, copy.deepcopy(config), setting)
    assert measured.weights_and_active_rows == pytest.approx(
        planned.weights + planned.active_rows, abs=200_000
    )  # rotary
    assert measured.gradients == planned.gradients
    assert measured.moments == pytest.approx(planned.moments, abs=4 * 1000, rel=0.001)  # step counts, vectors in 8 bits
    ordinary = peaks(METHODS[method](model, setting), model, setting, refresh=False)
    assert measured.peak == pytest.approx(max(ordinary.values()), rel=0.05)
    assert planned.peak >= 0.999 * max(ordinary.values())


REFRESHES = [
    pytest.param(llama("60m", 3), {"rank": 64}, id="60m"),
    pytest.param(llama("60m", 3), {"rank": 64, "checkpointing": False}, id="60m-all-saved"),
    pytest.param(llama("60m", 3), {"rank": 64, "dim": 0, **WHOLE}, id="60m-dim0-whole"),
    pytest.param(llama("13b", 4), {}, id="13b-wide", marks=SLOW),
    pytest.param(llama("13b"), {}, id="13b-full", marks=SOAK),
]


@pytest.mark.parametrize(("config", "options"), REFRESHES)
def test_plan_covers_steps_that_gather_a_sketch(config, options):
    setting, model = tracked({"selection": "multinomial_norm", **options}), Architecture.from_config(config)
    measured = track("Grass", copy.deepcopy(config), setting, refresh=True)
    assert measured.peak == pytest.approx(plan("Grass", model, setting).peak, rel=0.05)


HALF = {"dtype": torch.bfloat16, "seq_len": 32}
COMPUTED = [
    pytest.param("Grass", {}, id="keep", marks=SLOW),
    pytest.param("Grass", HALF, id="keep-bf16", marks=SLOW),
    pytest.param("Grass", {"state_policy": "reset"}, id="reset", marks=SLOW),
    pytest.param("Grass", {"state_policy": "bank"}, id="bank"),
    pytest.param("Grass", {"selection": "multinomial_norm"}, id="by-norm"),
    pytest.param("Grass", {"moment_dtype": "8bit", **HALF}, id="8bit", marks=SLOW),
    pytest.param("Grass int8", {"moment_dtype": "8bit", "dim": 0, **HALF}, id="int8-weights", marks=SLOW),
    pytest.param("Grass dense", {}, id="dense", marks=SLOW),
    pytest.param("Grass in backward", {}, id="in-backward"),
]
"""In float32, or with few tokens: a CPU without instructions for bfloat16 computes forty times slower in that."""


@pytest.mark.parametrize(("method", "options"), COMPUTED)
def test_plan_covers_refreshes_that_are_computed(method, options):
    """On real tensors a step runs to its end: selection, exchange with a bank, rounding of 8-bit moments."""
    config = llama("60m", 2)
    setting, model = (
        Setting(**{"rank": 64, "seq_len": 128, "dtype": torch.float32, **options}),
        Architecture.from_config(config),
    )
    planned, measured = plan(method, model, setting), track(method, config, setting, refresh=True, real=True)
    assert measured.moments == pytest.approx(planned.moments, abs=4 * 1000, rel=0.001)
    assert measured.host == planned.bank
    assert measured.peak == pytest.approx(planned.peak, rel=0.05)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_uniform_refresh_needs_no_sketch(dim):
    """The step before a refresh holds what any other step holds."""
    setting = tracked({"rank": 64, "dim": dim})
    ordinary, refreshing = (track("Grass", llama("60m", 3), setting, refresh=refresh) for refresh in (False, True))
    assert refreshing.activations == ordinary.activations
    assert refreshing.peak <= ordinary.peak


def test_what_a_sketch_adds_is_planned():
    model = Architecture.from_config(llama("60m", 3))
    by_norm, uniform = (
        plan("Grass", model, tracked({"rank": 64, **WHOLE, "selection": rule})) for rule in ("top_r", "uniform")
    )
    assert by_norm.activations > 1.1 * uniform.activations
    assert by_norm.peak_at.endswith("of a refresh step")
    assert not uniform.peak_at.endswith("of a refresh step")
