"""Compare the search of ``python -m grass.sweep`` with an exhaustive sweep of both rates, on three small tasks.

    python scripts/bench/sweep_search.py --csv benchmarks/sweep_search.csv     # about half an hour on one core
    python scripts/bench/sweep_search.py --steps 10 --reach 1                  # a minute: checks that it runs

The exhaustive sweep has all pairs of ``2 * reach + 1`` rates, powers of two around ``--lr`` and ``scale="auto"``. The
search starts from its centre, or with ``start`` = -2 from a quarter of both rates. Both train the same trials of
:class:`grass.sweep.language.LanguageModel`, one after another in this process. ``regret`` is how much higher the
held-out loss at the end is than the least one of the exhaustive sweep; ``share`` is the share of its steps. With
``margin``, runs that are behind by it after 30% of the steps are stopped.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.coverage import silent
from grass.sweep.bracket import Point, next_points
from grass.sweep.language import LanguageModel
from grass.sweep.stopping import Behind

ROOT = Path(__file__).parents[2]
Curve = list[tuple[int, float]]


def llama(hidden: int, layers: int) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )


TASKS: dict[str, tuple[PretrainedConfig, str, dict[str, object]]] = {
    "LLaMA, prose": (llama(64, 2), "docs/*.md", {}),
    "LLaMA, r = q = n/8, Python": (llama(96, 2), "grass/**/*.py", {"rank": 0.125}),
    "GPT-2, dense mode, C++": (
        GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=256),
        "grass/cpu/*.cpp",
        {"dense": True},
    ),
}


class Runs:
    """The curves of a task, each trained when it is first asked for."""

    def __init__(self, trial: LanguageModel, lr: float) -> None:
        self.trial, self.lr = trial, lr
        self.curves: dict[Point, Curve] = {}

    def curve(self, point: Point) -> Curve:
        """Held-out losses at a point, up to the first that is not finite."""
        if point not in self.curves:
            others, projected = point
            scale = self.trial.auto_scale() * 2.0 ** (projected - others)
            self.curves[point] = []
            for step, loss in self.trial(self.lr * 2.0**others, scale, folder=Path(), device="cpu"):
                self.curves[point].append((step, loss))
                if not math.isfinite(loss):
                    break
        return self.curves[point]

    def search(self, start: int, stop: Behind | None) -> tuple[float, int, int]:
        """Least loss, runs and steps of a search from the point ``(start, start)``, one run after another."""
        losses: dict[Point, float] = {}
        seen: dict[Point, Curve] = {}
        while new := next_points(losses):
            for point in new:
                seen[point] = self.until(stop, self.curve((point[0] + start, point[1] + start)), list(seen.values()))
                step, loss = seen[point][-1]
                losses[point] = loss if step == self.trial.steps and math.isfinite(loss) else math.inf
        return min(losses.values()), len(losses), sum(curve[-1][0] for curve in seen.values())

    def until(self, stop: Behind | None, curve: Curve, others: list[Curve]) -> Curve:
        """A curve up to where the rule stops it."""
        for i, (step, loss) in enumerate(curve):
            rivals = [dict(other)[step] for other in others if step in dict(other)]
            if stop and step < self.trial.steps and stop(step, self.trial.steps, loss, rivals):
                return curve[: i + 1]
        return curve


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of a run")
    parser.add_argument("--reach", type=int, default=3, help="halvings and doublings of the exhaustive sweep")
    parser.add_argument("--lr", type=float, default=8e-3, help="the centre of the sweep")
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep_search.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for task, (config, pattern, options) in TASKS.items():
        with tempfile.TemporaryDirectory() as directory, silent():
            config.save_pretrained(directory)
            files = tuple(str(path) for path in sorted(ROOT.glob(pattern)))
            trial = LanguageModel(directory, files, args.steps, scratch=True, batch_size=4, seq_len=64, **options)
            found = compare(Runs(trial, args.lr), range(-args.reach, args.reach + 1))
        print(task, found.to_string(index=False, float_format="%.4f"), sep="\n", flush=True)
        rows.append(found.assign(task=task))
    write(pd.concat(rows), args.csv, steps=args.steps, lr=args.lr)


def compare(runs: Runs, reach: range) -> pd.DataFrame:
    """The exhaustive sweep against searches from two starts, with and without stopping."""
    ends = [runs.curve((others, projected))[-1][1] for others in reach for projected in reach]
    least = min(end for end in ends if math.isfinite(end))
    rows = []
    for start in (0, -2):
        for stop in (None, Behind(0.05)):
            loss, count, steps = runs.search(start, stop)
            share = steps / (len(ends) * runs.trial.steps)
            found = {"loss": loss, "runs": count, "share": share, "least": least, "regret": loss - least}
            rows.append({"start": start, "margin": stop.margin if stop else 0, "all_runs": len(ends), **found})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
