"""Bytes of optimizer state, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from grass import PAPER, GrassAdamW
from grass.memory import state_bytes
from tests.reference import gradients_for, run

M, N, R = 24, 40, 6


def after_steps(parameters: list[Parameter], **options: object) -> GrassAdamW:
    optimizer = GrassAdamW(parameters, rank=R, **{**PAPER, "update_interval": 3, "selection": "uniform", **options})
    run(optimizer, parameters, gradients_for(parameters, 7))
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
def test_projected_weight(policy: str, replacement: bool, dim: int, dtype: torch.dtype) -> None:
    """``2 r n`` fp32 moments and ``r`` int64 indices on the device; all ``m`` rows of the bank on the host."""
    length, rows = (N, M) if dim == 0 else (M, N)
    weight = Parameter(torch.randn(M, N).to(dtype))
    optimizer = after_steps([weight], dim=dim, state_policy=policy, replacement=replacement)
    expected = 2 * R * length * 4 + 8 * R
    expected += 4 * R if policy in ("keep", "bank") else 0
    expected += 4 * R if replacement else 0
    assert state_bytes(optimizer).device == expected
    assert state_bytes(optimizer).host == (2 * rows * length * 4 + 4 * rows if policy == "bank" else 0)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2), (torch.bfloat16, 2)], ids=str)
def test_bank_dtype(dtype: str | torch.dtype, bytes_each: int) -> None:
    optimizer = after_steps([Parameter(torch.randn(M, N))], dim=0, state_policy="bank", bank_dtype=dtype)
    assert state_bytes(optimizer).host == 2 * M * N * bytes_each + 4 * M  # and one fp32 step count a row


def test_plain_parameters() -> None:
    """As torch's AdamW: two moments and one fp32 step count."""
    ours, theirs = Parameter(torch.randn(50)), Parameter(torch.randn(50))
    control = torch.optim.AdamW([theirs])
    run(control, [theirs], gradients_for([theirs], 2))
    assert state_bytes(after_steps([ours])) == state_bytes(control) == (2 * 50 * 4 + 4, 0)


@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_offloaded_state_is_on_the_host(policy: str) -> None:
    resident, offloaded = (
        state_bytes(after_steps([Parameter(torch.randn(M, N))], state_policy=policy, offload=offload))
        for offload in (None, "cpu")
    )
    assert offloaded == (0, sum(resident))


def test_weights_add_up() -> None:
    shapes = [(24, 40), (8, 6), (6, 5, 2), (9,)]
    parameters = [Parameter(torch.randn(shape)) for shape in shapes]
    expected = 0
    for shape in shapes[:3]:
        rows = shape[0]
        columns = int(torch.tensor(shape[1:]).prod())
        expected += 2 * R * max(rows, columns) * 4 + 8 * R
    assert state_bytes(after_steps(parameters)).device == expected + 2 * 9 * 4 + 4


def test_storage_behind_the_state_is_no_larger() -> None:
    """No state tensor is a view that keeps something bigger alive."""
    optimizer = after_steps([Parameter(torch.randn(M, N))], dim=0, state_policy="keep")
    (state,) = optimizer.state.values()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state.values() if torch.is_tensor(t)}
    assert sum(storage.nbytes() for storage in storages.values()) == state_bytes(optimizer).device


def test_before_the_first_step() -> None:
    assert state_bytes(GrassAdamW([Parameter(torch.randn(M, N))], rank=R)) == (0, 0)


def test_a_quantised_state_counts_as_its_parts():
    subclass = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.zeros(64, 128))], lr=0.1)
    optimizer.state[weight]["exp_avg"] = subclass.zeros((64, 128), block_size=256)
    codes, scales, code_book = 64 * 128, 4 * 64 * 128 // 256, 4 * 256
    assert state_bytes(optimizer) == (codes + scales + code_book, 0)
