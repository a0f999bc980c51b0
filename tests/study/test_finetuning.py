"""Finetuning cells: every method by the same Trainer, measured on the same held-out examples."""

import dataclasses
import os
import signal

import finetuning
import pytest
import run as study
import torch
from finetuning import finetune, finetune_task, held_out_blocks, trained_model
from grid import Cell, FinetuneConfig, Grid
from results import COLUMNS, CURVE, KEY

from grass import expand, matched_modules
from training.data.blocks import DataConfig
from training.finetune.instructions import IGNORED
from training.finetune.run import ADAPTERS
from training.run.optimizers import OptimizerConfig, build_optimizer

pytestmark = pytest.mark.slow  # each trains a base model first

CONFIGS = {
    "classify": FinetuneConfig(batch_size=4, max_length=24, examples=12),
    "instruct": FinetuneConfig(batch_size=2, max_length=96, examples=12),
    "facts": FinetuneConfig(batch_size=2, max_length=96, examples=12),
}


def cell(task, steps=10, seed=0, **optimizer):
    """In float32: some CPUs have no instructions for bfloat16."""
    settings = OptimizerConfig(seed=seed, **optimizer)
    return Cell(task=task, model="1m", steps=steps, seed=seed, optimizer=settings, autocast=False)


def curve(values):
    return [float(values[name]) for name in CURVE]


@pytest.fixture(scope="module")
def rows(base):
    """The values of short runs by task and method."""
    methods = {
        "adamw": {"name": "adamw"},
        "grass": {"name": "grass", "update_interval": 3},
        "compact": {"name": "grass", "update_interval": 3, "compact": True},
    }
    return {
        (task, method): finetune(cell(task, lr=3e-3, **settings), config, base)
        for task, config in CONFIGS.items()
        for method, settings in methods.items()
    }


@pytest.mark.parametrize("task", CONFIGS)
def test_every_method_learns_and_holds_what_it_should(rows, task):
    adamw, grass, compact = (rows[task, method] for method in ("adamw", "grass", "compact"))
    for values in (adamw, grass, compact):
        assert values.keys() == set(COLUMNS) - set(KEY) - {"commit"}
        assert 0 <= float(values["accuracy"]) <= 1
        assert values["tokens"] == adamw["tokens"]
        assert len(set(curve(values))) > 5
        if task != "classify":  # twelve docstrings of six packages teach nothing about others
            assert curve(values)[-1] < curve(values)[0] - 0.05
    assert grass["gradient_bytes"] == adamw["gradient_bytes"]
    assert compact["gradient_bytes"] < 0.7 * adamw["gradient_bytes"]
    assert grass["state_bytes"] == pytest.approx(compact["state_bytes"], rel=0.01)
    assert grass["state_bytes"] < 0.7 * adamw["state_bytes"]


@pytest.mark.parametrize("task", CONFIGS)
def test_unmoved_weights_give_the_loss_and_accuracy_of_the_examples_one_by_one(base, task):
    values = finetune(cell(task, name="adamw", lr=0.0, seed=3), CONFIGS[task], base)
    losses, hits = [], []
    model, examples = one_by_one(cell(task, seed=3), CONFIGS[task], base)
    for ids, labels in examples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits.float()
        if task == "classify":
            wanted = torch.tensor([labels])
        else:
            wanted = torch.tensor(labels)[1:]
            logits = logits[0, :-1][wanted != IGNORED]
            wanted = wanted[wanted != IGNORED]
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        hits.append(logits.argmax(-1) == wanted)
    assert curve(values) == pytest.approx([torch.cat(losses).mean().item()] * 10, abs=5e-3)
    assert float(values["accuracy"]) == pytest.approx(torch.cat(hits).float().mean().item(), abs=1e-4)


def one_by_one(of, config, base):
    """The cell's model, and its held-out examples before they are batched or packed."""
    task = finetune_task(of, config, base)
    rows = task.dataset["validation"]
    if of.task == "classify":
        return task.model.eval(), [(row["input_ids"], row["labels"]) for row in rows]
    examples = []
    for row in rows:
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(row["labels"])], strict=True):
            examples.append((row["input_ids"][start:end], row["labels"][start:end]))
    return task.model.eval(), [example for example in examples if set(example[1]) != {IGNORED}]


def test_the_same_cell_the_same_row(rows, base):
    again = finetune(
        cell("classify", lr=3e-3, name="grass", update_interval=3, compact=True), CONFIGS["classify"], base
    )
    assert again == rows["classify", "compact"]


def test_gradients_far_below_eps_move_nothing(base):
    unmoved = dataclasses.replace(cell("instruct", lr=3e-3, name="adamw"), clip=1e-12)
    losses = curve(finetune(unmoved, CONFIGS["instruct"], base))
    assert max(losses) - min(losses) < 2e-3


def test_seeds_differ(rows, base):
    other = finetune(cell("classify", lr=3e-3, name="adamw", seed=1), CONFIGS["classify"], base)
    assert curve(other) != curve(rows["classify", "adamw"])


@pytest.mark.parametrize("compact", [False, True])
def test_head_and_embeddings_train_at_full_rank(base, compact):
    task = finetune_task(cell("classify"), CONFIGS["classify"], base)
    projected = matched_modules(task.model)
    assert len(projected) == 4 * 7
    assert all(".layers." in name for name in projected)
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    optimizer = build_optimizer(task.model, OptimizerConfig(lr=0.01, compact=compact, explore=0))
    batch = task.collator([task.dataset["train"][i] for i in range(4)])
    task.model(**batch).loss.backward()
    optimizer.step()
    moved = {
        name: (p != before[name]).any(1) for name, p in task.model.named_parameters() if name in before and p.ndim == 2
    }
    assert moved["score.weight"].all()
    assert moved["model.embed_tokens.weight"][batch["input_ids"].unique()].all()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_train_alone_or_beside_what_is_not_projected(base, kind):
    of = dataclasses.replace(cell("facts", name="adamw"), adapter=kind, adapter_rank=2)
    whole, alone = (
        trained_model(finetune_task(of, CONFIGS["facts"], base), dataclasses.replace(of, only_projected=only))
        for only in (False, True)
    )
    trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (whole, alone)]
    assert all("lora_" in name for name in trained[1])
    extra = {name.split("base_model.model.")[-1] for name in trained[0] - trained[1]}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= extra
    assert not any("proj" in name for name in extra)


def test_with_only_projected_weights_the_others_stay(base):
    of = dataclasses.replace(cell("facts", lr=0.01, compact=True, rank=0.25), only_projected=True)
    task = finetune_task(of, CONFIGS["facts"], base)
    model = trained_model(task, of)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, of.optimizer)
    model(**task.collator([task.dataset["train"][i] for i in range(2)])).loss.backward()
    optimizer.step()
    expand(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"{name}.weight" for name in matched_modules(model)}


def test_what_was_learnt_before_is_measured_on_other_text(base, rows):
    """One block at a time, by the logits, for a base model that did not move."""
    values = finetune(cell("facts", name="adamw", lr=0.0), CONFIGS["facts"], base)
    model = finetune_task(cell("facts"), CONFIGS["facts"], base).model.eval()
    losses = []
    for ids in held_out_blocks(base):
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    assert float(values["pretraining_loss"]) == pytest.approx(sum(losses) / len(losses), abs=1e-3)
    assert rows["instruct", "adamw"]["pretraining_loss"] != values["pretraining_loss"]


def test_a_signal_leaves_no_row(base, monkeypatch):
    class Killed(finetuning.Watch):
        def on_optimizer_step(self, *arguments, **kw):
            super().on_optimizer_step(*arguments, **kw)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(finetuning, "Watch", Killed)
    assert finetune(cell("classify"), CONFIGS["classify"], base) is None


def test_a_missing_base_is_made_for_finetuning_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(study, "ensure_base", lambda path: asked.append(path) or path)
    monkeypatch.setattr(study, "pretrain", lambda cell, data, folder, device: {"loss_100": folder})
    monkeypatch.setattr(finetuning, "finetune", lambda cell, config, base: {"loss_100": config, "accuracy": base})
    grid = Grid(data=DataConfig(), finetuning=CONFIGS, studies=())
    assert study.run_cell(cell("pretrain"), grid, tmp_path, tmp_path / "cell")["loss_100"] == tmp_path / "cell"
    assert asked == []
    values = study.run_cell(cell("instruct"), grid, tmp_path, tmp_path / "cell")
    assert (values["loss_100"], values["accuracy"]) == (CONFIGS["instruct"], tmp_path)
    assert asked == [tmp_path]
