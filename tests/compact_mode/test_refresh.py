"""How the next rows are chosen: from exact norms or a sketch of them, and when."""

from __future__ import annotations

import argparse
import copy
import inspect
import math

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import gathered_norms, rademacher
from grass.parallel.ranks import Ranks
from tests.compact_mode.networks import (
    DIMS,
    Network,
    batches,
    compact_layers,
    converted,
    loss_of,
    plain_copy,
    selections,
    train,
)
from tests.reference import train as train_llama

REFRESH = ["sketch", "exact"]


def sketched_norms(layer: CompactLayer) -> torch.Tensor:
    return gathered_norms([layer], Ranks(None))[0]


def true_norms(model: Network, batch: tuple[Tensor, Tensor], dim: int) -> dict[str, Tensor]:
    """Norms of the full gradients' rows or columns, from a plain copy of the model."""
    dense = plain_copy(model)
    loss_of(dense, batch).backward()
    return {name: dense.get_submodule(name).weight.grad.norm(dim=1 - dim) for name in compact_layers(model)}


@pytest.mark.parametrize("dim", DIMS)
def test_exact_norms(dim: int) -> None:
    """Also over micro-batches, whose losses add up."""
    model, batch = Network(), batches(1)[0]
    grass.compact(model, rank=3, explore=0, dim=dim)
    expected = true_norms(model, batch, dim)
    for layer in compact_layers(model).values():
        layer.begin_sketch(None)
    for part in zip(*(t.chunk(3) for t in batch), strict=True):
        (loss_of(model, part) / 3).backward()
    for name, layer in compact_layers(model).items():
        torch.testing.assert_close(sketched_norms(layer), expected[name])
        assert layer.sketch is None


@pytest.mark.parametrize("dim", DIMS)
def test_sketched_norms(dim: int) -> None:
    """They are the norms of ``G S``; gathering them leaves output and gradients as they are."""
    model, batch = Network(), batches(1)[0]
    grass.compact(model, rank=3, explore=0, dim=dim)
    dense = plain_copy(model)
    loss_of(dense, batch).backward()
    loss_of(model, batch).backward()
    without = [layer.active.grad for layer in compact_layers(model).values()]
    model.zero_grad()
    signs = {
        name: torch.randn(m.weight.shape[1 - dim], 5) for name, m in dense.named_modules() if isinstance(m, nn.Linear)
    }
    for name, layer in compact_layers(model).items():
        layer.begin_sketch(signs[name])
    loss_of(model, batch).backward()
    for (name, layer), grad in zip(compact_layers(model).items(), without, strict=True):
        full = dense.get_submodule(name).weight.grad
        expected = (full if dim == 0 else full.t()) @ signs[name]
        torch.testing.assert_close(layer.sketch.grad, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(layer.active.grad, grad)


@pytest.mark.parametrize("dim", DIMS)
def test_norms_beyond_the_range_of_fp16(dim: int) -> None:
    """Elements of 20,000 are finite in fp16; the norm of 64 of them is not, nor is their sum."""
    x, grad = torch.full((1, 64), 200.0), torch.tensor([[100.0, 1.0]])
    layer = nn.Linear(64, 2, bias=False)
    if dim == 1:
        x, grad, layer = grad, x, nn.Linear(2, 64, bias=False)
    grass.compact(layer.half(), rank=1, explore=0, dim=dim)
    layer.begin_sketch(torch.ones(64, 4) / 2)
    layer(x.half()).backward(grad.half())
    assert layer.active.grad.isfinite().all()
    torch.testing.assert_close(sketched_norms(layer), torch.tensor([64.0 * 20_000, 64.0 * 200]))


def test_sketch_matrix() -> None:
    """Signs over ``sqrt(s)``; norms of sketched vectors are right on average and within ``sqrt(1 / (2 s))``."""
    width, size = 500, 32
    s = rademacher(width, size, torch.Generator().manual_seed(0))
    assert s.shape == (width, size)
    assert set(s.mul(math.sqrt(size)).round().flatten().tolist()) == {-1.0, 1.0}
    vectors = torch.randn(2000, width)
    ratio = (vectors @ s).norm(dim=1) / vectors.norm(dim=1)
    assert abs(ratio.square().mean() - 1) < 0.1
    assert ratio.std() < 1.5 * math.sqrt(1 / (2 * size))


@pytest.fixture(scope="module")
def byte_llama() -> tuple[nn.Module, Tensor]:
    """A LLaMA after a few steps on bytes of Python source, and its next batch."""
    transformers = pytest.importorskip("transformers")
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    *warm, last = torch.stack([text[i : i + 64] for i in torch.randint(len(text) - 64, (96,))]).chunk(12)
    train_llama(model, torch.optim.AdamW(model.parameters(), lr=3e-3), warm)
    return model, last


@pytest.mark.parametrize("dim", DIMS)
def test_energy_that_the_sketch_captures(byte_llama: tuple[nn.Module, Tensor], dim: int) -> None:
    """Rows chosen by a sketch of 32 columns hold 0.98 of what the best rows hold, and 0.9 in the worst layer."""
    (plain, tokens), captured = byte_llama, []
    model, dense = copy.deepcopy(plain), copy.deepcopy(plain)
    dense.zero_grad()
    dense(input_ids=tokens, labels=tokens).loss.backward()
    grass.compact(model, rank=0.25, explore=0, dim=dim)
    GrassAdamW(model, update_interval=1, selection="top_r")  # gathers in the very first step
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, layer in compact_layers(model).items():
        assert layer.signs.shape[1] == 32
        rank, energy = layer.selected.numel(), dense.get_submodule(name).weight.grad.norm(dim=1 - dim).square()
        chosen = energy[sketched_norms(layer).topk(rank).indices].sum()
        captured.append(float(chosen / energy.topk(rank).values.sum()))
        assert chosen > 1.1 * energy.sum() * 0.25, "random rows would capture a quarter"
    assert min(captured) > 0.9
    assert sum(captured) / len(captured) > 0.98


@pytest.mark.parametrize("refresh", REFRESH)
def test_gathered_only_when_needed(refresh: str) -> None:
    """With an interval of four, in the fourth, the eighth, ... step."""
    model, optimizer = converted(refresh=refresh, sketch_size=4)
    for step, batch in enumerate(batches(12), start=1):
        for layer in compact_layers(model).values():
            assert (layer.sketch is not None) == (step % 4 == 0)
            if layer.sketch is not None:
                assert layer.sketch.shape[1] == (4 if refresh == "sketch" else layer.matrix().shape[0])
        train(model, optimizer, [batch])


@pytest.mark.parametrize("update_interval", [1, 3])
@pytest.mark.parametrize("dim", DIMS)
def test_the_gradient_of_the_refresh_step_decides(dim: int, update_interval: int) -> None:
    """After every ``update_interval``-th step the rows are those largest in the gradient of that very step."""
    model, optimizer = converted(dim=dim, update_interval=update_interval, refresh="exact")
    expected = selections(model)
    for step, batch in enumerate(batches(9), start=1):
        if step % update_interval == 0:
            expected = [sorted(norms.topk(3).indices.tolist()) for norms in true_norms(model, batch, dim).values()]
        train(model, optimizer, [batch])
        assert selections(model) == expected
        for name, layer in compact_layers(model).items():
            assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected)), name
            assert optimizer.state[layer.active]["indices"].tolist() == layer.selected.tolist()


def test_each_refresh_draws_its_own_sketch() -> None:
    """Layers of one width share it; the next refresh and another seed have another."""
    signs = []
    for seed in (0, 0, 1):
        model, optimizer = converted(rank=3, dim=0, update_interval=1, sketch_size=4, seed=0)
        optimizer = GrassAdamW(model, update_interval=1, sketch_size=4, selection="top_r")
        for group in optimizer.param_groups:
            group["seed"] = seed
        for batch in batches(2):
            train(model, optimizer, [batch])
            signs.append(model.up.signs)
    first, second, again, _, other, _ = signs
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    twins = nn.Sequential(nn.Linear(40, 6), nn.Linear(40, 9))
    grass.compact(twins, rank=3, explore=0, dim=0)
    GrassAdamW(twins, update_interval=1, selection="top_r")
    assert torch.equal(twins[0].signs, twins[1].signs)


def test_sketch_no_smaller_than_the_gradient_is_exact() -> None:
    model, _optimizer = converted(update_interval=1, sketch_size=16)
    assert {name: layer.signs is None for name, layer in compact_layers(model).items()} == {
        "up": False,  # 20 rows
        "mix": True,  # 16
        "down": True,  # 8
    }


@pytest.mark.parametrize("refresh", REFRESH)
def test_a_step_given_up_leaves_nothing_in_the_sketch(refresh: str) -> None:
    """A backward whose gradients ``zero_grad`` drops, as after running out of memory, has no part in the selection."""
    data, selected = batches(3), []
    for given_up in (False, True):
        model, optimizer = converted(update_interval=2, refresh=refresh)
        train(model, optimizer, data[:1])
        if given_up:
            loss_of(model, (1e3 * data[2][0], data[2][1])).backward()
            optimizer.zero_grad()
        train(model, optimizer, data[1:2])
        selected.append([layer.selected for layer in compact_layers(model).values()])
    assert all(torch.equal(*pair) for pair in zip(*selected, strict=True))
