"""Every architecture of docs/models.md trains, saves, is read by ``from_pretrained`` and resumes as the page says."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import grass

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts/bench"))
models = __import__("models")

QUICK = ["GPT-2", "Falcon", "Mixtral", "GPT-OSS"]
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in models.MODELS]
MIXTURES = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "Jamba"]


def train(model: Any, optimizer: torch.optim.Optimizer, name: str, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)  # some models have dropout that is no module
        value = models.loss(model, name, step % 2)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def logits(model: Any, name: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        out = model(**models.inputs(name))
    found: torch.Tensor = out.logits_per_image if name == "CLIP" else out.logits
    return found


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", NAMES)
def test_trains_saves_and_resumes(name: str, mode: str, tmp_path: Path) -> None:
    model = models.build(name)
    optimizer = models.optimizer_of(model, mode, update_interval=3)
    losses = train(model, optimizer, name, 8)
    assert sum(losses[-2:]) < 0.98 * sum(losses[:2])
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(again, name), logits(model, name), rtol=1e-5, atol=1e-5)
    model.train()
    other = models.build(name, seed=1)
    by = models.optimizer_of(other, mode, update_interval=3)
    other.load_state_dict(model.state_dict())
    by.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, by, name, 4, 8) == train(model, optimizer, name, 4, 8)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_compute_what_transformers_does(name: str) -> None:
    plain, converted = models.build(name), models.build(name)
    plain.set_experts_implementation("eager")
    grass.compact(converted, rank=models.RANK, explore=models.EXPLORE)
    torch.testing.assert_close(logits(converted, name), logits(plain, name), rtol=1e-4, atol=1e-5)
    for model in (plain, converted):
        model.train()
        models.loss(model, name).backward()
    others = dict(plain.named_parameters())
    for key, p in converted.named_parameters():
        if key in others and p.requires_grad:  # embeddings, norms, routers: what flows through the experts
            torch.testing.assert_close(p.grad, others[key].grad, rtol=1e-3, atol=1e-5)
    grass.expand(converted)
    earlier = models.build(name).config._experts_implementation
    assert {part.config._experts_implementation for part in converted.modules() if hasattr(part, "config")} == {earlier}
    converted.set_experts_implementation("eager")
    assert {part.config._experts_implementation for part in converted.modules() if hasattr(part, "config")} == {"eager"}


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_the_table_is_measured(name: str) -> None:
    table = pd.read_csv(ROOT / "benchmarks/models.csv").set_index("model")
    assert list(table.index) == list(models.MODELS)
    for key, value in models.measure(name).items():
        if key != "model":
            assert table.loc[name, key] == pytest.approx(value, abs=1e-4)
