"""DeepSpeed on a CPU, where it is installed: without ZeRO it trains as one process does, with ZeRO it is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grass import GrassAdamW
from tests.compact_mode.networks import Network, converted, loss_of, train
from tests.distributed.training import OPTIONS, assert_close, dense, joint_batches, share, weights
from tests.distributed.world import run_world

os.environ["DS_ACCELERATOR"] = "cpu"
deepspeed = pytest.importorskip("deepspeed")


def built(mode: str) -> tuple[Network, GrassAdamW]:
    """DeepSpeed wants parameters to be contiguous."""
    if mode == "dense":
        return dense(torch.float32)
    return converted(torch.float32, **{**OPTIONS, "dim": 0})


def train_by_deepspeed(mode: str, stage: int) -> dict[str, Tensor]:
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 12, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": stage}
    model, optimizer = built(mode)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for batch in joint_batches(dtype=torch.float32):
        engine.backward(loss_of(engine, share(batch)))
        engine.step()
    return weights(model)


def without_zero(rank: int) -> list[dict[str, Tensor]]:
    return [train_by_deepspeed(mode, 0) for mode in ("dense", "compact")]


def test_without_zero() -> None:
    for results in run_world(without_zero, 2):
        for mode, ours in zip(("dense", "compact"), results, strict=True):
            model, optimizer = built(mode)
            train(model, optimizer, joint_batches(dtype=torch.float32))
            assert_close(ours, weights(model), rtol=1e-3, atol=1e-4)  # float32, nine steps of 0.01


def with_zero(rank: int) -> list[str]:
    errors = []
    for stage in (1, 2):
        for mode in ("dense", "compact"):
            with pytest.raises(RuntimeError, match="Of 3 parameters that rows are selected of, 0 are left") as error:
                train_by_deepspeed(mode, stage)
            errors.append(str(error.value))
    return errors


def test_zero_is_refused() -> None:
    for errors in run_world(with_zero, 2):
        assert len(errors) == 4
