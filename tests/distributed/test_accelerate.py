"""``accelerate.Accelerator.prepare`` with DDP and with its FSDP2 plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from grass import GrassAdamW, attach, compact
from tests.compact_mode.networks import Network, loss_of, train
from tests.distributed.training import OPTIONS, assert_close, joint_batches, share, weights
from tests.distributed.world import run_world

accelerate = pytest.importorskip("accelerate")

POLICY = {"selection": "multinomial_norm", "state_policy": "keep", **OPTIONS}


def accelerator(plugin: Any = None) -> Any:
    """On a CPU ``Accelerator`` itself offers DDP alone; the plugin's own code paths do not mind."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    made = accelerate.Accelerator(cpu=True)
    if plugin is not None:
        made.state.distributed_type = accelerate.DistributedType.FSDP
        made.state.fsdp_plugin = plugin
    return made


def plugin(**options: Any) -> Any:
    return accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", **options)


def built() -> tuple[Network, GrassAdamW]:
    model = Network(torch.float64)
    compact(model, rank=3, explore=0)
    return model, GrassAdamW(model, **POLICY)


def prepared(rank: int, sharded: bool) -> tuple[dict[str, Tensor], str]:
    made = accelerator(plugin(cpu_ram_efficient_loading=False) if sharded else None)
    model, optimizer = made.prepare(*built())
    for batch in joint_batches():
        optimizer.zero_grad()
        made.backward(loss_of(model, share(batch)))
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer.optimizer)
    assert len(saved["state"]) == sum(p.requires_grad for p in model.parameters())
    return weights(made.unwrap_model(model)) if not sharded else whole(model), type(model).__name__


def attached(rank: int) -> str:
    made, (model, _) = accelerator(), built()
    _, optimizer = made.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    with pytest.raises(TypeError, match=r"before accelerator.prepare\(\)") as error:
        attach(optimizer, model)
    attach(optimizer.optimizer, model)
    return str(error.value)


def test_attaching_to_a_prepared_optimizer() -> None:
    assert all(run_world(attached, 2))


def whole(model: Any) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("sharded", "wrapper"), [(False, "DistributedDataParallel"), (True, "FSDPNetwork")])
def test_prepared_training_equals_one_process(sharded: bool, wrapper: str) -> None:
    model, optimizer = built()
    train(model, optimizer, joint_batches())
    for ours, name in run_world(prepared, 2, sharded):
        assert name == wrapper
        assert_close(ours, weights(model))


def by_meta_device(rank: int) -> str:
    made = accelerator(plugin(cpu_ram_efficient_loading=True))
    with pytest.raises(RuntimeError, match="cpu_ram_efficient_loading=False") as error:
        made.prepare(*built())
    return str(error.value)


def test_loading_by_the_meta_device_is_refused() -> None:
    assert all(run_world(by_meta_device, 2))
