"""Time two trials of models larger than a device that take turns on it, block by block, and one after the other.

    python scripts/bench/sweep_alternating.py --csv benchmarks/sweep_alternating.csv    # about two minutes
    python scripts/bench/sweep_alternating.py --steps 2 --seconds 0.001 --rounds 1      # seconds: checks that it runs

The stand-in device and the models are those of ``sweep_pipelined.py``: a block sleeps, and ``grass.stream`` brings it
over a link on which it takes ``link`` times as long as its forward. Trials that take turns are one streamed model here,
whose units are the blocks of both by turns; their losses equal those of either trial alone, bit for bit. ``seconds`` is
the time of a step of both trials, the median of ``--rounds``, and ``times`` how many times as fast as one after the
other it is. ``cache`` keeps as many blocks on the device as trials that take turns have activations of.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from sweep_pipelined import BLOCKS, Block, batch, loss_of
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser

TRIALS, LINKS = 2, (0.5, 1.0, 2.0)


class Trials(nn.Module):
    """Models whose blocks take turns on the device; one model alone if there is one rate."""

    def __init__(self, rates: list[float], seconds: float, link: float, cached: int = 0) -> None:
        super().__init__()
        models = []
        for _ in rates:
            torch.manual_seed(0)
            models.append([Block(seconds) for _ in range(BLOCKS)])
        self.blocks = nn.ModuleList(model[i] for i in range(BLOCKS) for model in models)
        groups = [
            {"params": [p for block in model for p in block.parameters()], "lr": lr}
            for model, lr in zip(models, rates, strict=True)
        ]
        self.optimizer = torch.optim.SGD(groups)
        nbytes = sum(t.nbytes for t in self.blocks[0].parameters())
        offload = grass.Offload(_bytes_per_second=nbytes / (seconds * link))
        grass.stream(self, "cpu", units=["blocks"], offload=offload, cache=cached * nbytes)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs of all models."""
        for i, block in enumerate(self.blocks):
            inputs[i % len(inputs)] = block(inputs[i % len(inputs)])
        return inputs


def train(models: list[Trials], trials: int, steps: int) -> tuple[float, list[list[float]]]:
    """The seconds of a step of all trials, and the losses of each step."""
    losses = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        losses.append(list[float]())
        for model in models:
            x, target = batch(step)
            each = [loss_of(y, target) for y in model([x] * (trials // len(models)))]
            torch.stack(each).sum().backward()  # type: ignore[no-untyped-call]
            model.optimizer.step()
            model.optimizer.zero_grad()
            losses[-1] += [loss.item() for loss in each]
    return (time.perf_counter() - start) / steps, losses


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="of all contestants in turn")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a block's forward")
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep_alternating.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates = [1e-2 * (i + 1) for i in range(TRIALS)]
    rows = []
    for link in LINKS:
        took: dict[str, list[float]] = {"one after the other": [], "taking turns": [], "one after the other, cache": []}
        for _ in range(args.rounds):
            found = {}
            for method, times in took.items():
                together = [rates] if method == "taking turns" else [[lr] for lr in rates]
                cached = TRIALS if "cache" in method else 0
                models = [Trials(some, args.seconds, link, cached) for some in together]
                seconds, found[method] = train(models, TRIALS, args.steps)
                times.append(seconds)
            assert len({str(losses) for losses in found.values()}) == 1, found
        alone = median(took["one after the other"])
        rows += [
            {"link": link, "method": method, "seconds": median(times), "times": alone / median(times)}
            for method, times in took.items()
        ]
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, trials=TRIALS, steps=args.steps, rounds=args.rounds, block_seconds=args.seconds)


if __name__ == "__main__":
    main()
