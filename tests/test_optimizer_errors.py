"""What GrassAdamW refuses, when, and with which words."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from grass import PAPER, GrassAdamW

# (arguments, what the message must contain: the value and the bound).
VALUES = {
    "lr negative": (dict(lr=-0.1), r"-0\.1"),
    "lr nan": (dict(lr=math.nan), "nan"),
    "lr tensor of two": (dict(lr=torch.ones(2)), "lr"),
    "beta1 one": (dict(betas=(1.0, 0.9)), r"1\.0"),
    "beta2 negative": (dict(betas=(0.9, -0.5)), r"-0\.5"),
    "eps negative": (dict(eps=-1e-8), "-1e-08"),
    "weight decay negative": (dict(weight_decay=-0.2), r"-0\.2"),
    "rank zero": (dict(rank=0), "0"),
    "rank negative": (dict(rank=-3), "-3"),
    "fraction zero": (dict(rank=0.0), r"0\.0.*1"),
    "fraction above one": (dict(rank=1.5), r"1\.5.*1"),
    "rank nan": (dict(rank=math.nan), "nan"),
    "rank bool": (dict(rank=True), "True"),
    "rank beyond the rows": (dict(rank=6, dim=0), r"6.*5"),
    "rank beyond the columns": (dict(rank=8, dim=1), r"8.*7"),
    "rank beyond the smaller dimension": (dict(rank=6), r"6.*5"),
    "interval zero": (dict(update_interval=0), "0.*1"),
    "interval fraction": (dict(update_interval=2.5), r"2\.5"),
    "unknown selection": (dict(selection="best"), "best.*top_r.*uniform"),
    "top_r with replacement": (dict(selection="top_r", replacement=True), "top_r"),
    "dim two": (dict(dim=2), "2.*auto"),
    "dim word": (dict(dim="rows"), "rows.*auto"),
    "scale nan": (dict(scale=math.nan), "nan"),
    "unknown policy": (dict(state_policy="forget"), "forget.*reset.*keep.*bank"),
    "warm-up negative": (dict(warmup_after_refresh=-1), "-1.*0"),
    "unknown decay": (dict(decay="none"), "none.*selected.*all"),
    "bank dtype": (dict(bank_dtype="int8"), "int8.*float32.*bfloat16"),
    "bank dtype without a bank": (dict(bank_dtype="bfloat16"), "bank_dtype='bfloat16' takes state_policy='bank'"),
    "shared bank without a bank": (dict(shard_bank=True), "shard_bank=True takes state_policy='bank', got"),
    "moment dtype": (dict(moment_dtype=8), "moment_dtype='8': must be one of 'float32', 'bfloat16', '8bit'"),
    "weight decay infinite": (dict(weight_decay=math.inf), "inf"),
    "lr infinite": (dict(lr=math.inf), "inf"),
    "fused word": (dict(fused="yes"), "yes.*None, False, True"),
}


TYPES = {
    "betas a number": (dict(betas=0.9), r"betas=0\.9: must be two numbers in \[0, 1\)"),
    "betas words": (dict(betas=("a", "b")), "betas=.*two numbers"),
    "betas none": (dict(betas=None), "betas=None: must be two numbers"),
    "eps word": (dict(eps="small"), "eps='small': must be a finite number >= 0"),
    "weight decay none": (dict(weight_decay=None), "weight_decay=None: must be a finite number"),
    "scale word": (dict(scale="1"), "scale='1': must be a finite number > 0"),
}


@pytest.mark.parametrize(("arguments", "message"), TYPES.values(), ids=TYPES.keys())
def test_bad_types(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GrassAdamW([Parameter(torch.ones(5, 7))], **arguments)


@pytest.mark.parametrize(("arguments", "message"), VALUES.values(), ids=VALUES.keys())
def test_bad_values(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrassAdamW([Parameter(torch.ones(5, 7))], **{**PAPER, "rank": 2, **arguments})


@pytest.mark.parametrize(("arguments", "message"), VALUES.values(), ids=VALUES.keys())
def test_bad_values_in_a_group(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrassAdamW([{"params": [Parameter(torch.ones(5, 7))], **PAPER, "rank": 2, **arguments}])


def test_an_added_group_that_fails_leaves_no_trace() -> None:
    optimizer = GrassAdamW([Parameter(torch.ones(5, 7))], rank=2)
    with pytest.raises(ValueError, match="9"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3, 4))], "rank": 9})
    assert len(optimizer.param_groups) == 1


def test_complex_tensors() -> None:
    with pytest.raises(TypeError, match="complex"):
        GrassAdamW([Parameter(torch.ones(5, 7, dtype=torch.complex64))], rank=2)


def test_empty_parameter_list() -> None:
    with pytest.raises(ValueError, match="empty"):
        GrassAdamW([], rank=2)


@pytest.mark.parametrize("rank", [2, None], ids=["projected", "plain"])
def test_sparse_gradients_change_nothing(rank: int | None) -> None:
    """Also not the weights that come before the one in question."""
    first, table = Parameter(torch.ones(5, 7)), torch.nn.Embedding(5, 7, sparse=True)
    optimizer = GrassAdamW([{"params": [first]}, {"params": [table.weight], "rank": rank}], rank=2)
    first.grad = torch.ones_like(first)
    table(torch.tensor([1, 3])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert torch.equal(first, torch.ones(5, 7))
    assert torch.equal(table.weight, before)
    assert not optimizer.state.get(first)


def test_integer_rank_leaves_vectors_alone() -> None:
    """A bias shorter than the rank is no error: it is not projected."""
    bias = Parameter(torch.ones(2))
    optimizer = GrassAdamW([bias, Parameter(torch.ones(8, 8))], rank=5)
    bias.grad = torch.ones(2)
    optimizer.step()
    assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("rows", [300, 5000])
def test_a_parameter_that_was_resized(fused: bool | None, rows: int) -> None:
    """As by resize_token_embeddings, which keeps the parameter: a fused kernel would read past the moments."""
    table = torch.nn.Embedding(256, 16)
    optimizer = GrassAdamW(table.parameters(), lr=1e-2, fused=fused)
    table(torch.arange(256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    table.weight.data = torch.zeros(rows, 16)
    table(torch.arange(rows)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"\({rows}, 16\) has moments of \(256, 16\).*resize_token_embeddings"):
        optimizer.step()
    assert not table.weight.any()
