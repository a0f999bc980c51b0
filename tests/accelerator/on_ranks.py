"""Several processes, each with a stand-in of its own: they train as on the CPU with gloo, bit for bit.

What they send is queued on streams and arrives late, as with NCCL (``csrc/collectives.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import standin

standin.install()

from grass import GrassAdamW, Offload, param_groups  # noqa: E402
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook  # noqa: E402
from tests.compact_mode.networks import Network, converted, selections  # noqa: E402
from tests.distributed.test_fsdp import sharded, weights_of  # noqa: E402
from tests.distributed.training import OPTIONS, dense, joint_batches, train_jointly  # noqa: E402
from tests.distributed.world import run_world  # noqa: E402
from tests.fuzz.grid import CLOSE, GridRun, OnGrid, compared, in_panels  # noqa: E402
from tests.fuzz.test_grid import ACTIONS, SETTINGS  # noqa: E402

SIZE = 2
STEPS = 5
COMMON: dict[str, Any] = {"update_interval": 2, "fused": False}  # not the CPU's kernel, which rounds in another way
SAMPLED: dict[str, Any] = {"selection": "multinomial_norm"}
BANK: dict[str, Any] = {"selection": "multinomial_norm", "state_policy": "bank"}
ON_HOST = Offload(fraction=0.0)
BY_TURNS = Offload(fraction=0.4)
SHAPES = [(2, 1), (2, 2)]
ELSEWHERE = {"scaled": "the scaler is the CPU's"}
"""Actions that only the CPU's fuzzer has, and why."""
Found = dict[str, Tensor]


def everything(model: nn.Module, optimizer: GrassAdamW) -> Found:
    """Weights, selected rows and the optimizer's state, whole and on the host."""
    found = weights_of(model.state_dict())
    found.update((f"rows {i}", torch.tensor(rows)) for i, rows in enumerate(selections(model)))
    for i, state in optimizer.state_dict()["state"].items():
        tensors = {f"{key} of {i}": value for key, value in state.items() if isinstance(value, Tensor)}
        found.update(weights_of(tensors))
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def trained(model: nn.Module, optimizer: GrassAdamW, device: str, micro: int = 1) -> None:
    data = [(x.to(device), y.to(device)) for x, y in joint_batches(STEPS, torch.float32)]
    train_jointly(model, optimizer, data, micro)


def in_ddp(device: str, build: Callable[..., Any], *, hook: str | None = None, micro: int = 1, **options: Any) -> Found:
    model, optimizer = build(torch.float32, device=device, **COMMON, **options)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=micro == 2, bucket_cap_mb=400 / 2**20)
    if hook is not None:
        ddp.register_comm_hook(ReducedAllreduceState(optimizer, refresh=hook), reduced_allreduce_hook)
    trained(ddp, optimizer, device, micro)
    return everything(model, optimizer)


def in_fsdp(device: str, build: Callable[..., Any], **options: Any) -> Found:
    mesh = init_device_mesh(torch.device(device).type, (SIZE,))
    model, optimizer = build(torch.float32, device=device, mesh=mesh, **COMMON, **options)
    trained(model, optimizer, device)
    return everything(model, optimizer)


def sharded_dense(dtype: torch.dtype, device: str, mesh: Any, **options: Any) -> tuple[Network, GrassAdamW]:
    """A plain network, sharded layer by layer, and its optimizer in dense mode."""
    model = Network(dtype).to(device)
    for layer in (model.up, model.mix, model):
        fully_shard(layer, mesh=mesh)
    return model, GrassAdamW(param_groups(model, 3), **{**OPTIONS, "dim": 1, **options})


WAYS: dict[str, Callable[[str], Found]] = {
    "DDP, compact": partial(in_ddp, build=converted, **SAMPLED, explore=4),
    "DDP, compact, rows": partial(in_ddp, build=converted, selection="top_r", dim=0, micro=2),
    "DDP, dense": partial(in_ddp, build=dense, **SAMPLED, dim=1),
    "DDP, reduced": partial(in_ddp, build=dense, hook="full", **SAMPLED, dim=1, state_policy="keep"),
    "DDP, reduced, explored": partial(in_ddp, build=dense, hook="full", selection="uniform", dim=1, explore=4),
    "DDP, reduced, sketch": partial(in_ddp, build=dense, hook="sketch", **SAMPLED, dim=1, sketch_size=5, micro=2),
    "DDP, bank": partial(in_ddp, build=converted, **BANK),
    "DDP, bank divided": partial(in_ddp, build=converted, **BANK, shard_bank=True),
    "DDP, bank, dense": partial(in_ddp, build=dense, hook="full", **BANK, dim=1),
    "DDP, offload": partial(in_ddp, build=converted, offload=ON_HOST, **SAMPLED),
    "DDP, offload by turns": partial(in_ddp, build=converted, offload=BY_TURNS, **SAMPLED),
    "DDP, offload, bank": partial(in_ddp, build=converted, offload=ON_HOST, **BANK),
    "DDP, offload, reduced": partial(in_ddp, build=dense, offload=ON_HOST, hook="full", **SAMPLED, dim=1),
    "DDP, offload, reduced, explored": partial(
        in_ddp, build=dense, offload=ON_HOST, hook="sketch", **SAMPLED, dim=1, sketch_size=5, explore=4
    ),
    "FSDP2, compact": partial(in_fsdp, build=sharded, **SAMPLED, explore=4),
    "FSDP2, compact, rows": partial(in_fsdp, build=sharded, selection="top_r", dim=0, reshard_after_forward=False),
    "FSDP2, dense": partial(in_fsdp, build=sharded_dense, **SAMPLED),
    "FSDP2, bank": partial(in_fsdp, build=sharded, **BANK),
    "FSDP2, offload": partial(in_fsdp, build=sharded, offload=ON_HOST, **SAMPLED, explore=4),
    "FSDP2, offload, bank": partial(in_fsdp, build=sharded, offload=ON_HOST, **BANK),
    "FSDP2, offload, dense": partial(in_fsdp, build=sharded_dense, offload=ON_HOST, **SAMPLED),
}
QUICK = ["DDP, compact", "DDP, offload, reduced", "DDP, offload, bank", "FSDP2, compact", "FSDP2, offload"]


def on_cpu(rank: int, names: list[str]) -> list[Found]:
    return [WAYS[name]("cpu") for name in names]


def device_of(rank: int) -> str:
    """Each rank has a stand-in of its own, and of its devices another one than its neighbours."""
    index = rank % standin.DEVICES
    torch.accelerator.set_device_index(index)
    return f"standin:{index}"


def on_the_stand_in(rank: int, names: list[str], seeds: list[int]) -> list[list[Found]]:
    """For each way what it finds in each order."""
    device, found = device_of(rank), []
    for name in names:
        found.append([])
        for seed in seeds:
            standin.seed_order(SIZE * seed + rank)
            found[-1].append(WAYS[name](device))
            assert not (fault := standin.end()), f"{name}: {fault}"
    return found


def check(names: list[str], seeds: range, backend: str = standin.GROUP) -> None:
    every = run_world(on_cpu, SIZE, names)
    for rank, results in enumerate(run_world(on_the_stand_in, SIZE, names, list(seeds), backend=backend)):
        for name, expected, orders in zip(names, every[rank], results, strict=True):
            for seed, found in zip(seeds, orders, strict=True):
                assert found.keys() == expected.keys(), name
                wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
                assert not wrong, f"{name}, rank {rank}, seed {seed}: {wrong}"


def test_in_one_order() -> None:
    check(QUICK, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_many_orders(name: str) -> None:
    check([name], range(1, 9))


@pytest.mark.slow
def test_groups_that_take_no_tensors_of_the_host() -> None:
    """As ``init_process_group("nccl")`` makes them, but they cannot gather a divided bank, which is on the host."""
    check([name for name in WAYS if name != "DDP, bank divided"], range(1), "standin:standin_gloo")


def on_a_grid(rank: int, setting: OnGrid, actions: list[Any], seed: int) -> bool:
    """Do the same on a grid of CPUs and on one of stand-ins, with kept panels and without.

    The grid's tests leave the step on the CPU to its kernel, which rounds in another way.
    """
    device = device_of(rank)
    standin.seed_order(SIZE * seed + rank)
    for options in ({}, in_panels(setting)):
        compared([GridRun(setting, **options), GridRun(setting, device, **options)], actions, **CLOSE)
    assert not (fault := standin.end()), fault
    return True


def test_a_grid() -> None:
    setting = OnGrid((2, 1), options=(("update_interval", 2), ("state_policy", "bank"), ("decay", "all")))
    actions = [("train", {"number": 0, "steps": 2, "clip": 0.5, "batches": 1})]
    assert all(run_world(on_a_grid, SIZE, setting, actions, 0, backend=standin.GROUP))


@pytest.mark.slow
@given(
    SETTINGS.flatmap(lambda setting: st.sampled_from([replace(setting, shape=shape) for shape in SHAPES])),
    st.lists(st.one_of(ACTIONS).filter(lambda action: action[0] not in ELSEWHERE), min_size=4, max_size=12),
    st.integers(0, 1 << 20),
)
@settings(max_examples=8, phases=[Phase.generate])
def test_between_steps_on_a_grid(setting: OnGrid, actions: list[Any], seed: int) -> None:
    size = setting.shape[0] * setting.shape[1]
    assert all(run_world(on_a_grid, size, setting, actions, seed, backend=standin.GROUP))
