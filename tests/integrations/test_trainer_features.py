"""What Trainer's own options mean under Grass: each does what it does under AdamW."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grass
from tests.integrations.runs import MODES, Build, arguments, assert_same, checkpoint, logged, safetensors, trainer

transformers = pytest.importorskip("transformers")

IN_ORDER = {"train_sampling_strategy": "sequential"}


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_equals_the_joint_batch(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """Four micro-batches of one are one batch of four, also in the rows chosen."""
    runs = []
    for size in (1, 4):
        features = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        run = trainer(tiny_llama(), arguments(tmp_path, **features, **IN_ORDER), mode)
        run.train()
        runs.append(run)
    weights = [run.model.state_dict() for run in runs]
    for name, value in weights[0].items():
        # float32: sums in another order move Adam's direction where gradients are tiny, at most by a few steps of lr
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=5e-4)
    for ours, theirs in zip(*map(selections, runs), strict=True):
        assert torch.equal(ours, theirs)


def selections(run: Any) -> list[torch.Tensor]:
    found = [state["indices"] for state in run.optimizer.optimizer.state.values() if "indices" in state]
    assert found
    return found


@pytest.mark.parametrize("mode", MODES)
def test_clipping(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """The norm logged is that of the gradients there are, before clipping; what the moments see is clipped."""
    model = tiny_llama()
    run = trainer(model, arguments(tmp_path, max_grad_norm=0.1, max_steps=1, **IN_ORDER), mode)
    reference = copy.deepcopy(model)
    run.train()
    if mode == "compact":
        grass.compact(reference, rank=4, seed=run.args.seed)
    batch = run.train_dataset[:2]
    reference(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss.backward()
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    ((norm,),) = logged(run, "grad_norm")
    assert norm == pytest.approx(float(expected), rel=1e-5)
    assert norm > 0.1
    state = run.optimizer.optimizer.state[run.model.model.embed_tokens.weight]
    clipped = reference.model.embed_tokens.weight.grad * (0.1 / expected)
    torch.testing.assert_close(state["exp_avg"], 0.1 * clipped, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("mode", "features"),
    [
        pytest.param("dense", {"gradient_checkpointing": True}, id="dense-gradient_checkpointing"),
        pytest.param("compact", {"gradient_checkpointing": True}, id="compact-gradient_checkpointing"),
        pytest.param("compact", {"torch_compile": True}, id="compact-torch_compile", marks=pytest.mark.slow),
    ],
)
def test_same_as_without(tiny_llama: Build, tmp_path: Path, mode: str, features: dict[str, Any]) -> None:
    """Checkpointing and compilation change how, not what. In float64, as Adam and explored rows amplify rounding."""
    runs = []
    for chosen in (features, {}):
        torch.compiler.reset()
        run = trainer(tiny_llama(layers=1).double(), arguments(tmp_path, **chosen), mode)
        run.train()
        runs.append(run)
    for name, value in runs[0].model.state_dict().items():
        torch.testing.assert_close(runs[1].model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_computes_in_bf16(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """Autocast in forward and backward; weights, rows, moments and gradients stay float32."""
    model, seen = tiny_llama(), set()
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    run = trainer(model, arguments(tmp_path, bf16=True), mode)
    run.train()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    states = run.optimizer.optimizer.state.values()
    assert {state["exp_avg"].dtype for state in states} == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_load_best_model_at_end(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """The best checkpoint's weights come back, also after an interruption. Here the worst is called best."""
    options = {
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
    }
    whole = trainer(tiny_llama(), arguments(tmp_path / "whole", **options), mode)
    whole.train()
    losses = [loss for (loss,) in logged(whole, "eval_loss")]
    best = 1 + losses.index(max(losses))
    assert best < 6
    assert whole.state.best_model_checkpoint == str(tmp_path / f"whole/checkpoint-{best}")
    assert_same({**whole.model.state_dict()}, safetensors(tmp_path / f"whole/checkpoint-{best}"))
    assert whole.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-5)
    resumed = trainer(tiny_llama(seed=1), arguments(tmp_path / "resumed", **options), mode)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-4"))
    assert_same({**resumed.model.state_dict()}, {**whole.model.state_dict()})
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "whole", 6))


class RunsOut(nn.Module):
    """Runs out of memory with more than ``limit`` examples, at the end of the backward pass: sketches are there."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        super().__init__()
        self.limit, self.failures = limit, 0
        self.hook = model.model.layers[0].register_full_backward_hook(self.check)

    def check(self, module: nn.Module, gradients: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        if outputs[0].shape[0] > self.limit:
            self.failures += 1
            raise RuntimeError("CUDA out of memory.")


@pytest.mark.parametrize(("mode", "interval"), [("dense", 2), ("compact", 2), ("compact", 1)])
def test_auto_find_batch_size(tiny_llama: Build, tmp_path: Path, mode: str, interval: int) -> None:
    """A run that has to begin again with fewer examples ends as one that began with them, and resumes."""
    options = {"auto_find_batch_size": True, **IN_ORDER}
    searching = arguments(tmp_path / "searching", per_device_train_batch_size=4, **options)
    ours = trainer(tiny_llama(), searching, mode, update_interval=interval)
    memory = RunsOut(ours.model, limit=3)
    ours.train()
    assert memory.failures == 1
    assert ours._train_batch_size == 3
    assert not ours.optimizer.optimizer._optimizer_step_post_hooks, "the history of the first attempt is closed too"
    direct = arguments(tmp_path / "direct", per_device_train_batch_size=3, **options)
    trainer(tiny_llama(), direct, mode, update_interval=interval).train()
    assert_same(checkpoint(tmp_path / "searching", 6), checkpoint(tmp_path / "direct", 6))
    again = trainer(tiny_llama(seed=1), arguments(tmp_path / "again", **options), mode, update_interval=interval)
    again.train(resume_from_checkpoint=str(tmp_path / "searching/checkpoint-3"))
    assert again._train_batch_size == 3
    assert_same(checkpoint(tmp_path / "again", 6), checkpoint(tmp_path / "direct", 6))


@pytest.mark.parametrize("mode", MODES)
def test_saved_model_is_a_plain_one(
    tiny_llama: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, mode: str
) -> None:
    """``from_pretrained`` opens what the trainer saved: no message, equal weights, equal logits."""
    run = trainer(tiny_llama(), arguments(tmp_path / "run"), mode)
    run.train()
    run.save_model(tmp_path / "saved")
    transformers.utils.logging.enable_propagation()
    caplog.clear()
    recwarn.clear()
    opened = {}
    with caplog.at_level(logging.WARNING):
        for folder in ("saved", "run/checkpoint-6"):
            opened[folder], info = type(run.model).from_pretrained(
                tmp_path / folder, output_loading_info=True, attn_implementation="eager"
            )
            assert not any(info.values()), info
    transformers.utils.logging.disable_propagation()
    assert not caplog.records, caplog.text
    assert not recwarn.list, [str(warning.message) for warning in recwarn]
    batch = torch.stack([row["input_ids"] for row in run.train_dataset[:4]])
    if mode == "compact":
        grass.expand(run.model)
    run.model.eval()
    for model in opened.values():
        assert_same({**model.state_dict()}, {**run.model.state_dict()})
        assert not any("grass" in type(module).__module__ for module in model.modules())
        with torch.no_grad():
            assert torch.equal(model(batch).logits, run.model(batch).logits)
