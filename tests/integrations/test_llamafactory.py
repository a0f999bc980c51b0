"""LLaMA-Factory's ``run_sft`` of v1 with both plugins. Skipped where it is not installed (``docs/integrations.md``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llamafactory", exc_type=ImportError)
pytest.importorskip("omegaconf")
import transformers

from tests.integrations.runs import Build
from tests.integrations.test_trl import WORDS, tokenizer


def saved(build: Build, path: Path) -> dict[str, Any]:
    """A tiny model, its tokenizer and conversations, as files that a configuration names."""
    build().save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    rows = []
    for start in range(16):
        question, answer = WORDS[start], " ".join(WORDS[(start * 5 + i) % 61] for i in range(6))
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": [{**m, "content": [{"type": "text", "value": m["content"]}]} for m in talk]})
    for row in rows:
        row["messages"] = [{**m, "loss_weight": float(m["role"] == "assistant")} for m in row["messages"]]
    (path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": str(path / "model"),
        "train_dataset": str(path / "talks.jsonl"),
        "output_dir": str(path / "out"),
        "max_steps": 4,
        "micro_batch_size": 2,
        "cutoff_len": 32,
        "bf16": False,
        "batching_workers": 0,
        "enable_activation_checkpointing": False,
    }


def trained(build: Build, path: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Weights that LLaMA-Factory's ``run_sft`` saves."""
    from llamafactory.v1.trainers.sft_trainer import run_sft

    path.mkdir()
    run_sft({**saved(build, path), **more})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path / "out", output_loading_info=True)
    assert not any(info.values()), info
    return dict(model.state_dict())


def test_sft(tiny_llama: Build, tmp_path: Path) -> None:
    """Every column is LLaMA-Factory's own AdamW; a quarter saves a plain model too."""
    import grass.integrations.llamafactory  # noqa: F401

    optimizer = {"name": "grass", "lr": 1e-2, "weight_decay": 0.01}
    whole = {"name": "grass_compact", "rank": 1.0, "explore": 0}
    adamw = trained(tiny_llama, tmp_path / "adamw", learning_rate=1e-2)
    every = trained(tiny_llama, tmp_path / "every", peft_config=whole, optim_config=optimizer)
    quarter = trained(tiny_llama, tmp_path / "quarter", peft_config={**whole, "rank": 0.25}, optim_config=optimizer)
    torch.testing.assert_close(every, adamw, rtol=1e-5, atol=1e-5)  # float32, four steps of 1e-2
    changed = [name for name in quarter if not torch.equal(quarter[name], tiny_llama().state_dict()[name])]
    assert changed
    assert any(not torch.equal(quarter[name], adamw[name]) for name in changed)


@pytest.mark.parametrize(("config", "message"), [({"name": "grass"}, "has no lr"), ({"lr": 1.0}, "is not converted")])
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    from grass.integrations.llamafactory import optimizer

    with pytest.raises(ValueError, match=message):
        optimizer(torch.nn.Linear(2, 2), config)
