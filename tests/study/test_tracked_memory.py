"""Tracked peaks of a step: with few tokens, what weights, gradients and state take in closed form."""

import dataclasses

import pytest
import tracked_memory
from finetuning import finetune_task, trained_model
from grid import Cell, FinetuneConfig, Grid

from grass.memory.llama import llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig

pytestmark = pytest.mark.slow
GRID = Grid(data=DataConfig(batch_size=1, seq_len=16, eval_blocks=2), finetuning={}, studies=())


def cell(task="pretrain", name="adamw", adapter=None, adapter_rank=None, only_projected=False, **options):
    return Cell(
        task=task,
        model="1m",
        steps=10,
        seed=0,
        optimizer=OptimizerConfig(name=name, **options),
        autocast=False,
        adapter=adapter,
        adapter_rank=adapter_rank,
        only_projected=only_projected,
    )


def test_pretraining():
    data = load_data(GRID.data)
    model = build_llama(llama_config("1m", vocab_size=data.vocab_size, max_seq_len=16))
    linear = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    others = sum(p.numel() for p in model.parameters()) - linear
    adamw = tracked_memory.peak_of_pretraining(cell(), GRID)
    assert adamw == pytest.approx(16 * (linear + others), rel=0.05)
    compact = cell(name="grass", compact=True, rank=0.125)
    held = 4 * linear * (1 + 2 / 8 + 2 / 8 + 2 / 8) + 16 * others  # the rows, their gradients, moments of half of them
    assert tracked_memory.peak_of_pretraining(compact, GRID) == pytest.approx(held, rel=0.1)
    recipe = dataclasses.replace(compact.optimizer, stochastic_rounding=True, moment_dtype="8bit")
    half = dataclasses.replace(compact, optimizer=recipe, bf16_weights=True)
    assert tracked_memory.peak_of_pretraining(half, GRID) < held
    muon = tracked_memory.peak_of_pretraining(cell(name="muon", compact=True, rank=0.125), GRID)
    less = 4 * linear / 8  # one moment of the rows in place of two; its iterations have temporaries
    assert held - less < muon < 1.2 * held
    apollo = tracked_memory.peak_of_pretraining(cell(name="apollo", update_interval=50), GRID)
    assert 8 * (linear + others) < apollo < adamw, "weights, gradients and less state than AdamW's, with contents"


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_finetuning(base, monkeypatch, adapter):
    small = FinetuneConfig(batch_size=1, max_length=96, examples=2)
    monkeypatch.setattr(tracked_memory, "FINETUNING", {"instruct": small})
    of = cell("instruct", adapter=adapter, adapter_rank=adapter and 8, only_projected=True)
    model = trained_model(finetune_task(of, small, base), of)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    held = sum(16 * size if trained else 4 * size for size, trained in sizes)
    found = tracked_memory.peak_of_finetuning(of, base)
    assert held < found < held + 6e6, "and the activations of 96 tokens"
