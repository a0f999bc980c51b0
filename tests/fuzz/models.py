"""Three tiny models of blocks: plain ones, with tied weights, and with experts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grass
from tests.offload.test_faults import fail

WIDTH, BLOCKS, EXPERTS, VOCABULARY = 8, 4, 4, 16


class Block(nn.Module):
    """Two layers with a norm. It fails when it is told to; ``late`` is a parameter that does not train at first."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout, self.fails = nn.LayerNorm(WIDTH), nn.Dropout(dropout), ""
        self.late = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.make_layers()

    def make_layers(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def between(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        if self.fails == "forward" or (self.fails == "backward" and torch._C._current_graph_task_id() != -1):
            fail()
        y = x + self.dropout(self.between(self.norm(x))) + self.late + shift
        if self.fails == "gradient" and y.requires_grad:
            y.register_hook(fail)
        return y


class Experts(nn.Module):
    grass_experts: ClassVar = {"up": False, "down": True}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 3) for _ in range(2))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return grass.expert_linear(self, "down", grass.expert_linear(self, "up", x, ends).tanh(), ends)


class MixtureBlock(Block):
    """Each token goes to its best expert; few tokens leave experts without any."""

    def make_layers(self) -> None:
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def between(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        share, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0)
        y = self.experts(tokens[order], ends) * share[order, None]
        return torch.zeros_like(tokens, dtype=y.dtype).index_copy(0, order, y).view_as(x)


class Network(nn.Module):
    """Embedding, blocks, head. A forward may leave out the last blocks."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        block = MixtureBlock if kind == "experts" else Block
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.gain = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) / 4)
        self.checkpointed, self.kind = False, kind
        self.tie()

    def tie(self) -> None:
        """Tie weights; again after ``to()``, which parts them on devices that torch cannot exchange in place."""
        if self.kind == "tied":
            blocks: Any = self.blocks
            self.head.weight = self.embedding.weight
            blocks[2].up.weight = blocks[0].up.weight

    def forward(self, ids: Tensor, depth: int = BLOCKS) -> Tensor:
        x = self.embedding(ids)
        for block in list(self.blocks)[:depth]:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, self.shift, use_reentrant=False)
            else:
                x = block(x, self.shift)
        logits: Tensor = self.head(self.norm(x) + self.gain)
        return logits
