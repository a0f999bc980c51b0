import dataclasses
import math

import pytest
from grid import FINETUNING, Cell, FinetuneConfig, load_grid

from training.run.optimizers import OptimizerConfig


def test_cells_in_order_and_once(grid_file):
    keys = [cell.key for cell in load_grid(grid_file).cells]
    assert keys == [
        ("pretrain", "1m", "10", "0", "adamw", "lr=0.001"),
        ("pretrain", "1m", "10", "0", "adamw", "lr=0.01"),
        ("pretrain", "1m", "10", "0", "grass", "lr=0.001 rank=0.125 update_interval=3"),
        ("pretrain", "1m", "10", "0", "grass", "lr=0.01 rank=0.125 update_interval=3"),
        ("pretrain", "1m", "10", "0", "adamw", "lr=0.01 betas=0.8/0.9"),
        ("pretrain", "1m", "10", "1", "adamw", "lr=0.01 betas=0.8/0.9"),
        ("classify", "1m", "10", "0", "adamw", "lr=0.001"),
        ("instruct", "1m", "10", "0", "grass", "lr=0.001 rank=0.125 update_interval=3"),
    ]


def test_seed_reaches_the_row_selection(grid_file):
    assert [cell.optimizer.seed for cell in load_grid(grid_file).studies[1].cells] == [0, 1]


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ("rank: 0.125", "rang: 0.125", "Unknown rang in OptimizerConfig; allowed: .*rank"),
        (
            "horizon: short, seeds: [0, 1]",
            "horizon: week, seeds: [0]",
            "Unknown horizon 'week'; available: short, long",
        ),
        ("methods: [adamw],", "methods: [adam],", "Unknown method 'adam'; available: adamw, grass"),
        ("name: again,", "name: again, varry: {},", "Unknown varry in study 'again'"),
        ("short: 10", "short: 15", "steps=15: must be a positive multiple of 10"),
        ("model: 1m", "model: 2m", "Unknown model '2m'; available: 1m"),
        ("eval_blocks", "blocks", "Unknown blocks in DataConfig"),
        ("lr: 0.01, betas", "clip: -1, betas", "Invalid clip=-1: must be >= 0"),
        (
            "task: classify",
            "task: translate",
            "Unknown task 'translate'; available: pretrain, classify, instruct, facts",
        ),
        ("lr: 0.01, betas", "bf16_weights: true, lr: 0.01, betas", "bf16_weights=True with autocast=True"),
        ("task: classify", "task: classify, model: 9m", "model=9m for task=classify: finetuning starts from 1m"),
        ("  classify:", "  pretrain:", "Unknown pretrain in finetuning; allowed: classify, facts, instruct"),
        ("max_length: 16", "length: 16", "Unknown length in FinetuneConfig"),
        ("examples: 12", "examples: 0", "Invalid examples=0: must be >= 1"),
        ("methods:\n", "methodes:\n", "Unknown methodes in the grid"),
        ("model: 1m\n", "", "No model in the grid"),
        ("seeds: [0, 1], ", "", "No seeds in study 'final'"),
        ("seeds: [0, 1]", "seeds: 0", r"Invalid seeds=0 in study 'final': must be a list, as in \[0\]"),
        ("lr: [0.001, 0.01]", "lr: 0.001", r"Invalid lr=0.001 in study 'learning rate': must be a list"),
        ("vary: {lr", "bracket: {lr: 0.01}, vary: {lr", "Invalid bracket={'lr': 0.01} in .*: takes one setting"),
        ("vary: {lr: [0.001, 0.01]}", "bracket: {lr: 0.01, clip: 1}", "Invalid bracket={'lr': 0.01, 'clip': 1} in"),
        (
            "vary: {lr: [0.001, 0.01]}",
            "bracket: 0.01",
            "Invalid bracket=0.01 in study 'learning rate': takes one setting",
        ),
        ("vary: {lr: [0.001, 0.01]}", "bracket: {rate: 0.01}", "Unknown rate in OptimizerConfig"),
        ("lr: 0.01, betas", "lr: much, betas", r"Invalid lr='much': .* \(in study 'final'\)"),
        ("lr: 0.01, betas", "selection: topr, betas", r"Unknown selection 'topr'; .* \(in study 'final'\)"),
    ],
)
def test_mistakes_are_named(grid_file, found, put, message):
    grid_file.write_text(grid_file.read_text().replace(found, put))
    with pytest.raises(ValueError, match=message):
        load_grid(grid_file)


@pytest.mark.parametrize("diverged", [3.9, math.nan])
def test_a_bracket_doubles_until_the_best_is_inside_then_runs_other_seeds(grid_file, diverged):
    loss = {0.5: diverged, 1.0: 2.0, 2.0: 1.9, 4.0: 1.8, 8.0: 2.1}
    study = "{name: law, methods: [grass], horizon: short, seeds: [0, 1, 2], bracket: {scale: 1.0}}"
    grid_file.write_text(grid_file.read_text() + f"  - {study}\n")
    losses, rounds = {}, []
    while new := [cell for cell in load_grid(grid_file, losses).study("law").cells if cell.key not in losses]:
        rounds.append([(cell.seed, cell.optimizer.scale) for cell in new])
        losses |= {cell.key: loss[cell.optimizer.scale] for cell in new}
    assert rounds == [[(0, 1.0), (0, 0.5), (0, 2.0)], [(0, 4.0)], [(0, 8.0)], [(1, 4.0), (2, 4.0)]]
    assert {cell.key for cell in load_grid(grid_file, losses).study("law").cells} == losses.keys()


def test_a_bracket_waits_for_all_of_a_round(grid_file):
    study = "{name: law, methods: [adamw], horizon: short, seeds: [0, 1], bracket: {lr: 0.01}}"
    grid_file.write_text(grid_file.read_text() + f"  - {study}\n")
    cells = load_grid(grid_file).study("law").cells
    assert [cell.optimizer.lr for cell in cells] == [0.01, 0.005, 0.02]
    assert load_grid(grid_file, {cells[2].key: 1.0, cells[0].key: 2.0}).study("law").cells == cells


def test_finetuning_data_are_the_defaults_but_for_what_is_changed(grid_file):
    grid_file.write_text(grid_file.read_text().replace("batch_size: 4, max_length: 16, ", ""))
    found = load_grid(grid_file).finetuning
    assert found["classify"] == dataclasses.replace(FINETUNING["classify"], examples=12)
    assert found["instruct"] == FinetuneConfig(batch_size=2, max_length=96, examples=12)


def test_seed_of_cell_and_optimizer_agree():
    with pytest.raises(ValueError, match="seed=1 of the optimizer in a cell with seed=2"):
        Cell(model="1m", steps=10, seed=2, optimizer=OptimizerConfig(seed=1))


def test_adapters_are_settings_of_the_cell(grid_file):
    grid_file.write_text(
        grid_file.read_text().replace(
            "task: classify, methods: [adamw], horizon: short, seeds: [0]",
            "task: facts, methods: [adamw], horizon: short, seeds: [0], "
            "set: {adapter: dora, adapter_rank: 2, only_projected: true}",
        )
    )
    (found,) = (cell for cell in load_grid(grid_file).study("finetuning").cells if cell.adapter)
    assert found.settings == "lr=0.001 adapter=dora adapter_rank=2 only_projected=True"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "pretrain", "only_projected": True}, "only_projected.*task=pretrain: they are for finetuning"),
        ({"adapter": "vera", "adapter_rank": 2}, "adapter=vera with adamw: must be one of lora, dora, rslora"),
        ({"adapter": "lora"}, "adapter=lora with adapter_rank=None: both or none"),
        ({"adapter": "lora", "adapter_rank": 2, "name": "grass"}, "adapter=lora with grass: .*trained by adamw"),
    ],
)
def test_adapters_that_cannot_be(settings, message):
    optimizer = OptimizerConfig(name=settings.pop("name", "adamw"))
    with pytest.raises(ValueError, match=message):
        Cell(**{"task": "facts", "model": "1m", "steps": 10, "seed": 0, "optimizer": optimizer, **settings})


@pytest.mark.parametrize(
    ("name", "values"),
    [("clip", "1, 0.5"), ("final_lr", "0.1, 0.5"), ("batch_size", "null, 2")],
)
def test_a_setting_of_the_cell_is_named_where_it_is_not_the_default(grid_file, name, values):
    varied = f"set: {{lr: 0.01}}, vary: {{{name}: [{values}]}}"
    grid_file.write_text(grid_file.read_text().replace("set: {lr: 0.01}", varied))
    usual, changed = load_grid(grid_file).study("again").cells
    assert usual.settings == "lr=0.01 rank=0.125 update_interval=3"
    assert getattr(usual, name) == getattr(Cell, name)
    assert changed.settings == f"{usual.settings} {name}={getattr(changed, name)}"


def test_what_only_pretraining_takes_is_refused_elsewhere(grid_file):
    classify = "task: classify, set: {final_lr: 0}"
    grid_file.write_text(grid_file.read_text().replace("task: classify", classify))
    with pytest.raises(ValueError, match="Invalid final_lr=0 for task=classify: only pretraining takes it"):
        load_grid(grid_file)


def test_exponents_are_numbers(grid_file):
    grid_file.write_text(grid_file.read_text().replace("lr: [0.001, 0.01]", "lr: [1e-3, 1E-2]"))
    assert [cell.settings for cell in load_grid(grid_file).cells[:2]] == ["lr=0.001", "lr=0.01"]
