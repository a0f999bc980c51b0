"""Measured times make the division: the same on all ranks; memory that ends, errors, files, and times that change."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from grass.distributed import deal
from grass.distributed.uneven import Deal, drift, measuring
from grass.distributed.uneven.drift import Stopwatch
from grass.distributed.uneven.measuring import Search
from grass.machine import rates
from grass.machine.division import Division
from grass.machine.profile import Profile
from grass.machine.rates import machine_name
from grass.parallel.ranks import Ranks
from tests.distributed.uneven.training import llama, samples
from tests.distributed.world import HANG, attempt_world, run_world


class Clock:
    """Time that passes only where work says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def patched(module: Any) -> Clock:
    module.time = Clock()
    return module.time


def limits(rank: int, most: list[int], errors: list[str]) -> list[Any]:
    """Work that takes ``1 + m`` seconds on rank 0 and thrice that on rank 1, and has memory for so many samples."""
    clock = patched(measuring)
    clock.now = 1.0
    tried = []

    def work(size: int) -> None:
        tried.append(size)
        torch.rand(3)
        if size > most[rank]:
            raise {"cuda": torch.OutOfMemoryError, "host": MemoryError, "torch": RuntimeError}[errors[rank]](
                "DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes"
            )
        clock.now += (1 + 2 * rank) * (1 + size)

    before = torch.get_rng_state()
    made = deal(work, 16, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    return [
        made.division.sizes,
        made.division.micro_batches,
        made.profiles[rank].largest,
        sorted(set(tried)),
        repr(made),
    ]


@pytest.mark.parametrize("errors", [["cuda", "cuda"], pytest.param(["host", "torch"], marks=pytest.mark.slow)], ids=str)
def test_memory_that_ends_is_the_largest_size(errors: list[str]) -> None:
    """The first rank has memory for all, the other one for five samples: six, seven and eight were tried."""
    first, second = run_world(limits, 2, [100, 5], errors)
    assert first[:2] == second[:2] == [(13, 3), 1]
    assert (first[2], second[2]) == (15, 5)
    assert first[3] == [1, 2, 4, 8, 15]
    assert second[3] == [1, 2, 4, 5, 6, 8]
    assert first[4] == second[4] == "16 samples: 1 micro-batches of 13, 3; predicted seconds 14, 12"


@pytest.mark.slow
def test_memory_makes_more_micro_batches() -> None:
    assert run_world(limits, 2, [5, 3], ["cuda", "cuda"])[0][:3] == [(5, 3), 2, 5]


@pytest.mark.slow
def test_nothing_fits() -> None:
    for outcome in attempt_world(limits, 2, [4, 0], ["cuda", "cuda"]):
        assert "ValueError: Not one sample fits on rank 1 (largest micro-batches: [4, 0])" in outcome.error


def wrong(rank: int, case: str, path: Path) -> None:
    def work(size: int) -> None:
        if case == "error" and rank == 1:
            raise KeyError("no such column")
        if case == "dies" and rank == 1:
            os._exit(1)

    if case == "batch":
        deal(work, [16, 15][rank])
    elif case == "sizes":
        deal([[11, 5], [10, 6]][rank], 16)
    elif case == "one wrong":
        deal([[11, 5], [11, -5]][rank], 16)
    elif case == "seeds":
        deal([11, 5], 16).batches(64, seed=rank)
    elif case == "hardware":
        file = path / f"{rank}.json"
        machine = "AMD EPYC 9654, 16 threads, NVIDIA H100" if rank == 1 else ""
        file.write_text(json.dumps({"machine": machine, "seconds": {"1": 1.0}, "largest": 4}))
        deal(work, 16, profile=file, device="cpu")
    else:
        deal(work, 1 if case == "small" else 16, largest=0 if case == "largest" else None)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("error", "RuntimeError: rank 1: KeyError: 'no such column'"),
        ("batch", "ValueError: The ranks differ in batch and replan_every: (16, 0) on rank 0; (15, 0) on rank 1"),
        ("sizes", "ValueError: The ranks differ in sizes: 16 samples: 1 micro-batches of 11, 5 on rank 0; 16 samples"),
        ("one wrong", "ValueError: rank 1: ValueError: Invalid sizes=[11, -5]"),
        ("seeds", "The ranks differ in seed: 0 on ranks [0]; 1 on ranks [1]"),
        ("hardware", "1.json holds times of 'AMD EPYC 9654, 16 threads, NVIDIA H100', this is"),
        ("small", "Invalid batch=1: must be at least the number of ranks, 2"),
        ("largest", "Invalid largest=0: must be >= 1"),
    ],
)
def test_errors_on_every_rank(case: str, error: str, tmp_path: Path) -> None:
    for outcome in attempt_world(wrong, 2, case, tmp_path):
        assert outcome.error not in (None, HANG)
        assert error in outcome.error


@pytest.mark.slow
def test_a_rank_that_dies() -> None:
    first, second = attempt_world(wrong, 2, "dies", Path())
    assert second.error == "died"
    assert first.error not in (None, HANG)


def from_files(rank: int, path: Path) -> list[Any]:
    rates.SECONDS, rates.HOST_ROWS, rates.CPU_SIDE = 0.01, 8, 64
    rates.LEAST_BYTES, rates.MOST_BYTES = 1 << 14, 1 << 16
    calls = []
    made = [deal(calls.append, 8, profile=path / f"{rank}.json", device="cpu") for _ in range(2)]
    first = len(calls)
    if rank == 1:
        (path / "1.json").unlink()
    deal(calls.append, 8, profile=path / f"{rank}.json", device="cpu")
    found = Profile.read(path / f"{rank}.json").rates
    assert found.name == machine_name("cpu")
    assert min(found.host_rate, found.up_rate, found.down_rate, found.memory) > 0
    return [made[0].profiles == made[1].profiles, first, len(calls)]


def test_profiles_are_stored_and_read(tmp_path: Path) -> None:
    """Where one rank has no file, all measure again."""
    for same, first, both in run_world(from_files, 2, tmp_path):
        assert same
        assert first * 2 == both == 2 * 4 * (1 + measuring.REPEATS)


def test_the_log_has_the_even_division_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "grass"):
        deal(lambda size: None, 4, device="cpu")
    (line,) = [record.message for record in caplog.records if "evenly" in record.message]
    assert line.count("4 samples: ") == 2


def test_search_without_room() -> None:
    search = Search(8)
    search.note(1, None)
    assert search.next() is None
    assert search.largest == 0


def changing(rank: int) -> list[Any]:
    """Rank 1 becomes three times as slow in step 4; a look after every second step."""
    drift.STEPS = 2
    measuring.time = drift.time = clock = Clock()
    Stopwatch.__init__.__globals__["STEPS"] = 2
    slower, lines = [1.0], []
    logging.getLogger("grass").addHandler(logging.StreamHandler(_Lines(lines)))
    logging.getLogger("grass").setLevel(logging.INFO)

    def work(size: int) -> None:
        clock.now += size * (slower[0] if rank == 1 else 1.0)

    clock.now = 1.0
    made = deal(work, 8, replan_every=2, device="cpu")
    data, model = samples(32), llama()
    loader = DataLoader(data, batch_sampler=made.batches(len(data), shuffle=False))
    sizes, taken = [], []
    for epoch in range(2):
        for step, rounds in enumerate(made.rounds(loader), 4 * epoch):
            slower[0] = 3.0 if step >= 3 else 1.0
            for k, batch in enumerate(rounds):
                with made.synced(model, k):
                    work(len(batch["labels"]))
            sizes.append(made.division.sizes)
            taken += [batch["input_ids"] for batch in rounds]
    return [sizes, [line for line in lines if "changed" in line], torch.cat(taken)]


def of_ddp(rank: int) -> list[float]:
    """Two micro-batches of 2 and 3 seconds; DDP waits 5 seconds before a forward, and 7 in the last backward."""
    drift.time = clock = Clock()
    model = torch.nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    clock.now = 1.0
    made = Deal(Division((1, 1), 2, (1.0, 1.0)), Ranks(dist.group.WORLD), [object()], replan_every=1)

    def passes(seconds: float) -> None:
        clock.now += seconds

    ddp._pre_forward = lambda *a, run=ddp._pre_forward, **k: (passes(5.0), run(*a, **k))[1]
    for k in range(2):
        with made.synced(ddp, k):
            out = ddp(torch.ones(1, 2))
            passes(2.0)
            out.register_hook(lambda grad: passes(3.0))
            out.sum().backward()
            if k == 1:
                passes(7.0)
    made._stopwatch.end_step()
    return list(made._stopwatch.seconds)


def test_waiting_for_other_ranks_is_not_timed() -> None:
    assert run_world(of_ddp, 2) == [[10.0], [10.0]]


def of_fsdp(rank: int) -> list[Any]:
    """Rank 1 computes three times as long as rank 0, which waits 50 seconds for it before each forward."""
    drift.time = measuring.time = clock = Clock()
    clock.now = 1.0
    model = llama()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    ids = samples()[0]["input_ids"]

    def waits(module: Any, name: str, seconds: float) -> None:
        call = getattr(module, name)
        setattr(module, name, lambda *a, **k: (passes(seconds), call(*a, **k))[1])

    def passes(seconds: float) -> None:
        clock.now += seconds

    waits(FSDPParamGroup, "wait_for_unshard", 50.0 * (rank == 0))
    waits(FSDPParamGroup, "post_backward", 20.0 * (rank == 0))
    model.model.layers[0].mlp.register_forward_hook(lambda m, i, out: passes(len(out) * (1.0 + 2 * rank)))

    def work(size: int) -> None:
        model(input_ids=ids.expand(size, -1)).logits.sum().backward()
        model.zero_grad()

    made = deal(work, 8, model=model, device="cpu", replan_every=50)
    for _ in range(2):
        with made.synced(model):
            work(made.size)
        made.end_step(1)
    return [made.division.sizes, made.profiles[rank].seconds, list(made._stopwatch.seconds)]


def test_waiting_in_fsdp_is_not_timed() -> None:
    first, second = run_world(of_fsdp, 2)
    assert first[0] == second[0] == (6, 2)
    assert first[1] == {size: pytest.approx(float(size)) for size in (1, 2, 4, 7)}
    assert first[2] == second[2] == [pytest.approx(6.0)] * 2


class _Lines:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> None:
        pass


def test_another_division_when_times_change() -> None:
    """The look after step 6 sees both slow steps; the samples stay those of the steps."""
    first, second = run_world(changing, 2)
    assert first[0] == second[0]
    assert first[0][:4] == [(4, 4)] * 4
    assert first[0][-1] == (6, 2)
    assert "micro-batches of 6, 2" in first[1][0]
    assert "before: 8 samples: 1 micro-batches of 4, 4" in first[1][0]
    both = torch.cat([first[2], second[2]])
    every = torch.stack([sample["input_ids"] for sample in samples(32)])
    assert sorted(both.tolist()) == sorted(2 * every.tolist())
