"""Compact mode under torch's other parallel styles: sequences divided, inputs prepared for a block, a divided loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import grass
from grass import GrassAdamW
from tests.distributed.strata import EXACT, convert, whole_state
from tests.distributed.test_compact_tensor_parallel import CASES, OPTIONS, ROWS, meshes, own_share, whole
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 5, 4, 6, 24, 16, 4
TOKENS = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
BY_OUTPUT, BY_INPUT = ("attention.query", "attention.key", "attention.value", "mlp.up"), ("attention.out", "mlp.down")
CLIP = 0.5


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


class Attention(nn.Module):
    """Causal; the number of heads follows from what the projections give, as their ranks have some heads each."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(WIDTH, WIDTH) for _ in range(3))
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        )
        return mixed


class MLP(nn.Module):
    """Two layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 32, bias=True), linear(32, WIDTH, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH, dtype=torch.float64), Attention()
        self.second, self.mlp = nn.LayerNorm(WIDTH, dtype=torch.float64), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """Its head is converted only where ``grass.compact`` is told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH, dtype=torch.float64), linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plan() -> dict[str, Any]:
    """Between the blocks each rank has a part of the sequence, and at the end a part of the vocabulary."""
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    block: dict[str, Any] = {
        "first": SequenceParallel(),
        "attention": PrepareModuleInput(**gathered),
        "second": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        **{name: ColwiseParallel() for name in BY_OUTPUT},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in BY_INPUT},
    }
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"blocks.*.{name}": style for name, style in block.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def train(model: nn.Module, optimizer: GrassAdamW, data: Any = None) -> list[Tensor]:
    """The loss is the mean over the tokens of all ranks with data of their own. Returns losses and norms."""
    seen = []
    for tokens in TOKENS:
        inputs, labels = own_share((tokens[:, :-1], tokens[:, 1:]), data)
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert float(whole(norm)) > CLIP
        optimizer.step()
        seen += [whole(loss), whole(norm)] if data is None else [whole(norm)]
    return seen


def divided(rank: int, dim: int, sizes: tuple[int, ...], cases: list[dict[str, Any]]) -> list[Any]:
    every = []
    for case in cases:
        options = dict(case)
        data, parts = meshes(*sizes) if len(sizes) > 1 else (None, init_device_mesh("cpu", sizes))
        model = parallelize_module(Decoder(), parts, plan())
        grass.compact(model, dim=dim, targets=options.pop("targets", None), **ROWS)
        if data is not None:
            placement = grass.distributed.shard_placement_fn(model)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=data, shard_placement_fn=placement)
        seen = train(model, GrassAdamW(model, **OPTIONS, **options), data)
        every.append(({name: whole(value) for name, value in model.state_dict().items()}, seen))
    return every


def one_process(dim: int, case: dict[str, Any], *, with_losses: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    options, model = dict(case), Decoder()
    divided_along = {1: BY_INPUT, 0: BY_OUTPUT}[dim]
    strata = {f"blocks.{block}.{name}": 2 for block in range(2) for name in divided_along}
    targets = options.pop("targets", None)
    if targets is not None and dim == 0:
        strata["head"] = 2
    convert(model, strata, dim, targets=targets, **ROWS)
    seen = train(model, GrassAdamW(model, **OPTIONS, **options))
    return whole_state(model), seen if with_losses else seen[1::2]


WITH_HEAD: dict[str, Any] = {"targets": ".*"}


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        pytest.param((2,), [{}], id="alone"),
        pytest.param((2,), [*CASES[1:], WITH_HEAD], id="alone, other settings", marks=pytest.mark.slow),
        pytest.param((2, 2), [*CASES, WITH_HEAD], id="fsdp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_sequences_inputs_and_loss(dim: int, sizes: tuple[int, ...], cases: list[dict[str, Any]]) -> None:
    """Losses, norms and weights of ``SequenceParallel``, ``PrepareModuleInput`` and ``loss_parallel`` together."""
    ranks = run_world(divided, math.prod(sizes), dim, sizes, cases)
    for number, case in enumerate(cases):
        expected, seen = one_process(dim, case, with_losses=len(sizes) == 1)
        assert all(not torch.equal(expected[name], value) for name, value in Decoder().state_dict().items())
        for every in ranks:
            ours, theirs = every[number]
            assert ours.keys() == expected.keys()
            assert_close(ours, expected, **EXACT)
            torch.testing.assert_close(theirs, seen, **EXACT)
