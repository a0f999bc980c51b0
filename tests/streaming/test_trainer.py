"""``transformers.Trainer`` and TRL with a streamed model: the runs, logs and checkpoints of the resident model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from tests.integrations.runs import (
    MODES,
    Build,
    arguments,
    assert_same,
    checkpoint,
    examples,
    logged,
    trainer,
    transformers,
)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}
LONG = ("bf16", "checkpointing")


def run(
    build: Build, path: Path, mode: str, features: dict[str, Any], *, streamed: bool, resume: Path | None = None
) -> Any:
    """A finished run. The resident model is checkpointed, as the streamed one is."""
    model: Any = build(seed=0 if resume is None else 1, layers=4)
    if mode == "compact":
        grass.compact(model, rank=MODES[mode]["rank"])
    if streamed:
        model.handle = grass.stream(model, device="cpu")
    else:
        features = {"gradient_checkpointing": True, **features}
    options = {"rank": None} if mode == "compact" else {}
    each = trainer(model, arguments(path, **features), mode, offload="cpu" if streamed else None, **options)
    each.train(resume_from_checkpoint=str(resume) if resume else None)
    return each


@pytest.mark.parametrize(
    "features",
    [pytest.param(FEATURES[name], id=name, marks=pytest.mark.slow if name in LONG else ()) for name in FEATURES],
)
@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow if m == "dense" else ()) for m in MODES])
def test_trainer(tiny_llama: Build, tmp_path: Path, mode: str, features: dict[str, Any]) -> None:
    runs = []
    for name in ("resident", "streamed"):
        each = run(tiny_llama, tmp_path / name, mode, features, streamed=name == "streamed")
        runs.append([logged(each, *names) for names in (("loss", "grad_norm"), ("eval_loss",), ("grass_turnover",))])
    assert each.model.handle.counts.loads > 0
    assert len(runs[0][0]) == 6
    assert len(runs[0][1]) == (3 if "eval_steps" in features else 0)
    assert_same(*runs)
    for step in (3, 6):
        assert_same(checkpoint(tmp_path / "streamed", step), checkpoint(tmp_path / "resident", step))


@pytest.mark.parametrize("mode", MODES)
def test_resume(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    features = {"gradient_accumulation_steps": 2}
    whole = run(tiny_llama, tmp_path / "whole", mode, features, streamed=True)
    first = tmp_path / "whole/checkpoint-3"
    resumed = run(tiny_llama, tmp_path / "resumed", mode, features, streamed=True, resume=first)
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "whole", 6))
    assert_same(logged(resumed, "loss", "grad_norm"), logged(whole, "loss", "grad_norm"))


def test_a_model_converted_too_late(tiny_llama: Build, tmp_path: Path) -> None:
    """Trainer would convert it when it makes the optimizer."""
    model = tiny_llama()
    grass.stream(model, device="cpu")
    with pytest.raises(RuntimeError, match="The model is streamed"):
        trainer(model, arguments(tmp_path), "compact").train()


def test_a_plain_trainer(tiny_llama: Build, tmp_path: Path) -> None:
    """Its own AdamW steps on the host; then it predicts."""
    runs = []
    for streamed in (False, True):
        model = tiny_llama(layers=4)
        args = arguments(tmp_path / str(streamed), gradient_checkpointing=not streamed)
        if streamed:
            grass.stream(model, device="cpu", offload_activations=True)
        each = transformers.Trainer(model, args, train_dataset=examples(), eval_dataset=examples(4))
        each.train()
        predicted = torch.from_numpy(each.predict(examples(4)).predictions)
        runs.append([logged(each, "loss", "grad_norm"), each.evaluate()["eval_loss"], predicted])
    assert_same(*runs)


def test_sft(tiny_llama: Build, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from tests.integrations.test_trl import run as finetune

    def streamed(seed: int) -> torch.nn.Module:
        model = tiny_llama(seed=seed)
        grass.stream(model, device="cpu")
        return model

    finetune(tiny_llama, tmp_path / "resident", "dense")
    finetune(streamed, tmp_path / "streamed", "dense")
    finetune(streamed, tmp_path / "resumed", "dense", tmp_path / "streamed/checkpoint-3", seed=1)
    expected = checkpoint(tmp_path / "resident", 6)
    assert_same(checkpoint(tmp_path / "streamed", 6), expected)
    assert_same(checkpoint(tmp_path / "resumed", 6), expected)
