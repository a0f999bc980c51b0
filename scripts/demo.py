"""Train the same small model with AdamW and with Grass, and compare: `make demo`.

    python scripts/demo.py            # about 2 minutes on 2 idle CPU cores, after the installation
    python scripts/demo.py --smoke    # seconds: checks that it runs, the numbers mean nothing

All runs start from the same weights and read the same batches of the embedded corpus, the Python standard library as
bytes. All have the same two learning rates, one for the linear layers and one for everything else. Prints one table and
writes runs/demo/loss.png.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import torch
from torch import nn
from torch.optim import Optimizer

import grass
from grass.command_line import ArgumentParser
from grass.memory.llama import llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.config import TrainConfig
from training.run.loop import Result, Trainer
from training.run.models import build_llama

SEED = 3
"""Not one of those the learning rates were chosen or checked with."""

METHODS = ("AdamW", "Grass", "Grass compact")
"""What is compared: a row of the table and two curves each."""

RATES = {"linear": 1.5e-3, "rest": 0.012}
"""Learning rates of linear layers and of all other parameters.

They are AdamW's best in runs of this length (``benchmarks/quality/cells.csv``: half and double of the first are worse),
and Grass takes them as they are. Losses of one method differ by some hundredths from seed to seed, so a single run does
not rank methods that are closer than that.
"""

RANK = 0.25


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few tokens")
    args = parser.parse_args()
    steps = 4 if args.smoke else args.steps
    data_config = DataConfig(seed=SEED, seq_len=32 if args.smoke else 256, eval_blocks=4 if args.smoke else 64)
    shutil.rmtree(args.out, ignore_errors=True)
    results = {}
    for method in METHODS:
        print(f"{method}: {steps} steps")
        config = TrainConfig(
            out=run_directory(args.out, method), steps=steps, warmup=steps // 10, eval_every=max(1, steps // 8)
        )
        results[method] = run(method, data_config, config)
        if results[method].step < steps:
            raise SystemExit(f"Stopped at step {results[method].step} of {steps}: the same command begins again")
    print(f"\n{table(results, args.out).to_string()}\n")
    print(
        "Dense Grass keeps autograd's full gradients; compact mode forms those of selected and explored columns only."
    )
    print(f"Loss curves: {plot(args.out)}")


def run_directory(out: Path, method: str) -> Path:
    return out / method.lower().replace(" ", "-")


def run(method: str, data_config: DataConfig, config: TrainConfig) -> Result:
    """Train the model from the same start, on the same batches, whatever the optimizer."""
    data = load_data(data_config)
    config_1m = llama_config("1m", vocab_size=data.vocab_size, max_seq_len=data_config.seq_len)
    model = build_llama(config_1m, seed=SEED)
    return Trainer(model, build_optimizer(model, method), data, config).run()


def build_optimizer(model: nn.Module, method: str) -> Optimizer:
    """The optimizer of a method; its first group has the linear layers, of Grass with a rank."""
    linear = grass.matched_modules(model)
    if method == "Grass compact":
        grass.compact(model, rank=RANK, seed=SEED)
    groups = {"linear": list[nn.Parameter](), "rest": list[nn.Parameter]()}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups["linear" if name.rpartition(".")[0] in linear else "rest"].append(p)
    both = [{"params": groups[name], "lr": lr} for name, lr in RATES.items()]
    if method == "AdamW":
        return torch.optim.AdamW(both, fused=True)
    return grass.GrassAdamW([both[0] | ({"rank": RANK} if method == "Grass" else {}), both[1]], seed=SEED)


def table(results: dict[str, Result], out: Path) -> pd.DataFrame:
    """One row per method; tokens/s of the median step, which other work on the machine disturbs least."""
    rows = {
        method: {
            "eval loss": f"{result.eval_loss:.3f}",
            "tokens/s": f"{read_log(out, method)['tokens_per_second'].median():,.0f}",
            "state bytes": f"{result.state_bytes.device:,}",
            "host bank bytes": f"{result.state_bytes.host:,}",
            "gradient bytes": f"{result.gradient_bytes:,}",
        }
        for method, result in results.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def read_log(out: Path, method: str) -> pd.DataFrame:
    return pd.read_csv(run_directory(out, method) / "metrics.csv", index_col="step")


def plot(out: Path) -> Path:
    """Draw smoothed training losses and evaluation losses of all methods."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for method in METHODS:
        log = read_log(out, method)
        (line,) = axes.plot(log["loss"].ewm(span=25).mean(), alpha=0.5, label=f"{method}, training (smoothed)")
        held_out = log["eval_loss"].dropna()
        axes.plot(held_out, "o-", color=line.get_color(), label=f"{method}, held out ({held_out.iloc[-1]:.3f})")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per byte", title="LLaMA 1m on the Python standard library")
    axes.legend()
    axes.grid(alpha=0.3)
    path = out / "loss.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
