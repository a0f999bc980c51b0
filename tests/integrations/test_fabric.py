"""Lightning's Fabric: a loop of one's own; resumed, a run ends as if never stopped. Needs the extra ``lightning``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from tests.integrations.runs import MODES, Build, assert_same, examples

fabric_of = pytest.importorskip("lightning.fabric")
CLIP = 0.1


def parts(build: Build, mode: str, seed: int) -> tuple[torch.nn.Module, grass.GrassAdamW]:
    model = build(seed=seed)
    options = {key: value for key, value in MODES[mode].items() if key not in ("mode", "rank", "dim")}
    if mode == "compact":
        grass.compact(model, rank=4, explore=0)
        return model, grass.GrassAdamW(model, lr=1e-2, **options)
    return model, grass.GrassAdamW(grass.param_groups(model, rank=4, dim=1), lr=1e-2, **options)


def batches() -> list[dict[str, torch.Tensor]]:
    rows = [row["input_ids"] for row in examples(12)]
    return [{"input_ids": ids, "labels": ids} for ids in torch.stack(rows).split(2)]


def by_fabric(build: Build, mode: str, path: Path, first: int = 0, **options: Any) -> dict[str, Any]:
    """Six steps with a checkpoint after three, or the last three from it."""
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    model, optimizer = fabric.setup(*parts(build, mode, seed=first))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if first:
        fabric.load(path / "saved.ckpt", state, weights_only=True)
        assert state["step"] == first
    for step, batch in enumerate(batches()):
        if step < first:
            continue
        optimizer.zero_grad()
        fabric.backward(model(**batch).loss)
        assert fabric.clip_gradients(model, optimizer, max_norm=CLIP) > CLIP
        optimizer.step()
        if step == 2:
            fabric.save(path / "saved.ckpt", {**state, "step": 3})
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def by_hand(build: Build, mode: str) -> dict[str, Any]:
    model, optimizer = parts(build, mode, seed=0)
    for batch in batches():
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
        optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("mode", MODES)
def test_equals_a_plain_loop_and_resumes(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    expected = by_hand(tiny_llama, mode)
    assert not torch.equal(
        expected["model"]["model.layers.0.mlp.up_proj.weight"], tiny_llama().model.layers[0].mlp.up_proj.weight
    )
    assert_same(by_fabric(tiny_llama, mode, tmp_path), expected)
    assert_same(by_fabric(tiny_llama, mode, tmp_path, first=3), expected)
