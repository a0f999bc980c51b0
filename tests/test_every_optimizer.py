"""The one hook on all optimizers of a process tells of every step, and of none that comes after its end."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import grass
from grass.every_optimizer import after_every_step, before_every_step


def step(optimizer: torch.optim.Optimizer) -> None:
    """A step by a gradient of ones."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def test_steps_of_any_optimizer_and_of_its_copies() -> None:
    told: list[tuple[str, torch.optim.Optimizer]] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    step(optimizer)
    end_before = before_every_step(lambda stepped: told.append(("before", stepped)))
    end_after = after_every_step(lambda stepped: told.append(("after", stepped)))
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin, optimizer):
        step(each)
    assert told == [(when, each) for each in (optimizer, twin, optimizer) for when in ("before", "after")]
    end_after()
    told.clear()
    step(optimizer)
    assert told == [("before", optimizer)]
    end_before()
    step(optimizer)
    assert told == [("before", optimizer)]


def test_grass_sets_one_hook_on_all_optimizers() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    grass.compact(model, rank=2)
    stream = grass.stream(model, "cpu")
    before, after = (
        [hook for hook in hooks.values() if hook.__module__.startswith("grass")]
        for hooks in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    )
    assert len(before) == 1
    assert not after
    stream.close()
