"""Time models larger than a device on stand-in devices that sleep: a trial a device, or one model over all devices.

    python scripts/bench/sweep_pipelined.py --csv benchmarks/sweep_pipelined.csv        # about six minutes
    python scripts/bench/sweep_pipelined.py --trials 2 --steps 2 --seconds 0.001        # seconds: checks that it runs

A model has twelve blocks, of which a device holds three: ``grass.stream`` brings the others over a link that is as slow
as a block's forward. ``pool`` runs ``--trials`` models by ``grass.sweep``, each on one device. ``pipelined`` runs them
one after another, each divided over both devices by ``torch.distributed.pipelining`` (GPipe); a stage streams its half.
Both compute a block's forward twice and sleep twice as long in its backward. Each micro-batch brings the blocks of a
stage again. ``seconds`` is the time of all steps of all trials, without the start of processes, and ``pool_faster`` how
many times that of the pool it is. ``formula`` is ``(m + d - 1) / m`` for ``m`` micro-batches on ``d`` devices: what the
pipeline's bubble costs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
import grass.sweep
from grass.command_line import ArgumentParser

DEVICES, BLOCKS, WIDTH, BATCH = 2, 12, 64, 4


class Sleep(torch.autograd.Function):
    """The same values, after some time; twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sleep."""
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """A layer that takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``(BATCH, WIDTH)`` to the same."""
        y: Tensor = Sleep.apply(x + self.layer(x).tanh(), self.seconds)  # type: ignore[no-untyped-call]
        return y


class Part(nn.Module):
    """Some of a model's blocks, streamed, with their optimizer; a micro-batch takes its share of a block's time."""

    def __init__(self, blocks: range, lr: float, seconds: float, microbatches: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        every = [Block(seconds / microbatches) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(every[i] for i in blocks)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr)  # sums in another order stay close
        nbytes = sum(t.nbytes for t in self.blocks[0].parameters())
        grass.stream(self, "cpu", units=["blocks"], offload=grass.Offload(_bytes_per_second=nbytes / seconds))

    def forward(self, x: Tensor) -> Tensor:
        """All of its blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trial(lr: float, *, steps: int, seconds: float, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """The whole model on one device."""
    torch.set_num_threads(1)
    model, start = Part(range(BLOCKS), lr, seconds), time.perf_counter()
    for step in range(1, steps + 1):
        x, target = batch(step)
        loss = loss_of(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        model.optimizer.step()
        model.optimizer.zero_grad()
        if step == steps:
            (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - start))
        yield step, loss.item()


def pipeline(rank: int, out: str, rates: list[float], steps: int, seconds: float, microbatches: int) -> None:
    """One model after another, of which this process has one stage."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=DEVICES)
    took, losses = 0.0, []
    size = BLOCKS // DEVICES
    for lr in rates:
        part = Part(range(rank * size, (rank + 1) * size), lr, seconds, microbatches)
        given = torch.empty(BATCH // microbatches, WIDTH).requires_grad_(rank > 0)
        made = torch.empty_like(given, requires_grad=True)
        stage = PipelineStage(part, rank, DEVICES, torch.device("cpu"), input_args=(given,), output_args=(made,))
        schedule = ScheduleGPipe(stage, microbatches, loss_fn=loss_of)
        dist.barrier()
        start, parts = time.perf_counter(), list[Tensor]()
        for step in range(1, steps + 1):
            x, target = batch(step)
            parts = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=parts)
            part.optimizer.step()
            part.optimizer.zero_grad()
        dist.barrier()
        took += time.perf_counter() - start
        losses.append(float(sum(loss.detach() for loss in parts)) / microbatches)
    if rank == DEVICES - 1:
        Path(out, "result.json").write_text(json.dumps([took, losses]))
    dist.destroy_process_group()


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of a trial")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a block's forward")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep_pipelined.csv"))
    args = parser.parse_args()
    rates = [1e-2 * (i + 1) for i in range(args.trials)]
    pool, losses = pooled(rates, args.steps, args.seconds)
    rows = [{"method": "pool", "microbatches": 1, "seconds": pool}]
    for microbatches in args.microbatches:
        with tempfile.TemporaryDirectory() as out:
            given = (out, rates, args.steps, args.seconds, microbatches)
            torch.multiprocessing.spawn(pipeline, given, nprocs=DEVICES)  # type: ignore[no-untyped-call]
            took, theirs = json.loads(Path(out, "result.json").read_text())
        torch.testing.assert_close(theirs, losses, rtol=1e-4, atol=1e-6)  # float32, sums in another order
        rows.append({"method": "pipelined", "microbatches": microbatches, "seconds": took})
    result = pd.DataFrame(rows).assign(pool_faster=lambda rows: rows.seconds / pool, devices=DEVICES)
    result["formula"] = [1.0, *((m + DEVICES - 1) / m for m in args.microbatches)]
    result["formula_8_devices"] = [1.0, *((m + 7) / m for m in args.microbatches)]
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, trials=args.trials, steps=args.steps, block_seconds=args.seconds)


def pooled(rates: list[float], steps: int, seconds: float) -> tuple[float, list[float]]:
    """Seconds that the steps of all trials keep a device busy, divided by the devices; the last losses."""
    with tempfile.TemporaryDirectory() as out:
        run = partial(trial, steps=steps, seconds=seconds)
        names = [f"cpu:{i}" for i in range(DEVICES)]
        table = grass.sweep.run(run, {"lr": rates}, out=out, steps=steps, devices=names)
        assert {row["end"] for row in table} == {"done"}, table
        took = [json.loads(path.read_text()) for path in Path(out).glob("*.files/seconds.json")]
    return sum(took) / DEVICES, [row["loss"] for row in table]


if __name__ == "__main__":
    main()
