"""What these tests train: a LLaMA in float64 on ragged sequences, by the loop of the guide, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import grass
from grass.distributed.uneven import Deal
from grass.labels import next_tokens

TOKENS = 12
BATCH = 8
STEPS = 10
"""Three refreshes, after steps 3, 6 and 9, and a step after the last one."""

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
"""In float64 a sum over ranks differs from one process's by its order alone; Adam's division magnifies that."""

Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]


def samples(count: int = 40) -> list[dict[str, Tensor]]:
    """Sequences that predict 1 to 10 tokens each."""
    generator = torch.Generator().manual_seed(7)
    every = []
    for _ in range(count):
        ids = torch.randint(64, (TOKENS,), generator=generator)
        labels = ids.clone()
        labels[: torch.randint(2, TOKENS, (), generator=generator)] = -100
        every.append({"input_ids": ids, "labels": labels})
    return every


def llama() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).double()


def build(mode: str, selection: str = "uniform") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer in a mode."""
    model = llama()
    if mode == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)
    options: dict[str, Any] = {"lr": 3e-3, "update_interval": 3, "selection": selection}
    if mode == "dense":
        return model, grass.GrassAdamW(grass.param_groups(model, rank=0.25, explore=0.25), **options)
    grass.compact(model, rank=0.25)
    return model, grass.GrassAdamW(model, **options)


def epochs(deal: Deal, steps: int, **options: Any) -> Iterator[list[Any]]:
    """The micro-batches of so many steps."""
    data = samples()
    loader = DataLoader(data, batch_sampler=deal.batches(len(data), seed=3, **options))
    done = options.get("start", 0)
    while True:
        for rounds in deal.rounds(loader):
            if done == steps:
                return
            yield rounds
            done += 1


def train(
    deal: Deal,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    clip: bool = True,
    stream: Any = None,
    **options: Any,
) -> list[float]:
    """The loop of the guide; returns the mean losses of the whole batches."""
    losses = []
    for rounds in epochs(deal, steps, **options):
        items = deal.items(rounds)

        def loss_of(batch: dict[str, Tensor], items: Tensor = items) -> Tensor:
            logits = model(input_ids=batch["input_ids"]).logits  # transformers would compute its loss in float32
            return functional.cross_entropy(logits.mT, next_tokens(batch["labels"]), reduction="sum") / items

        if stream is None:
            own = []
            for k, batch in enumerate(rounds):
                with deal.synced(model, k):
                    loss = loss_of(batch)
                    loss.backward()
                own.append(loss.detach())
        else:
            with deal.synced(model):
                own = [stream.step(rounds, loss_of)]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(own).sum().double() / len(deal.division.sizes)
        if deal.ranks.group is not None:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses


def one_process(mode: str, selection: str = "uniform", **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of one process with the whole batch."""
    model, optimizer = build(mode, selection)
    losses = train(grass.distributed.deal([BATCH], BATCH), model, optimizer, **options)
    return dict(model.state_dict()), losses
