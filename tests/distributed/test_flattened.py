"""Wrappers that flatten parameters (DeepSpeed ZeRO, FSDP1) are refused: no weight is trained whole unnoticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grass import GrassAdamW
from tests.compact_mode.networks import converted
from tests.distributed.training import dense


def flatten(optimizer: GrassAdamW) -> list[nn.Parameter]:
    """One flat parameter in place of each group's, with a gradient."""
    flat = []
    for group in optimizer.param_groups:
        flat.append(nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]])))
        flat[-1].grad = torch.ones_like(flat[-1])
        group["params"] = [flat[-1]]
    return flat


@pytest.mark.parametrize("build", [dense, converted])
def test_flattened_parameters_are_refused(build: object) -> None:
    _, optimizer = build()
    flat = flatten(optimizer)
    before = [p.detach().clone() for p in flat]
    with pytest.raises(RuntimeError, match="Of 3 parameters that rows are selected of, 0 are left"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(flat, before, strict=True))
