"""Peak memory of compact mode on LLaMA 1b, 7b and 13b: torch's memory tracker against the closed form.

    python scripts/bench/compact_memory.py                     # 1b, 7b, 13b at sequence 2048, some minutes
    python scripts/bench/compact_memory.py --models 60m --rank 64

Runs on fake tensors of full size, so that it needs neither the memory nor a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from grass.memory import estimate_llama
from grass.training.memory_tracking import track_compact_llama
from grass.training.models import LLAMA_SHAPES, llama_config

GIB = 2**30


def row(size: str, args: argparse.Namespace) -> dict[str, object]:
    """Measured and estimated bytes of one model."""
    config = llama_config(size, vocab_size=32_000, max_seq_len=args.seq_len)
    setting = {"rank": args.rank, "dim": args.dim, "batch_size": args.batch_size, "seq_len": args.seq_len}
    measured, estimate = track_compact_llama(config, **setting), estimate_llama(config, **setting)
    print(f"{size}:\n{estimate}\nmeasured    {measured.peak / 2**20:>13,.1f} MiB\n", flush=True)
    return {
        "model": size,
        **setting,
        "parameters_gib": measured.parameters / GIB,
        "gradients_gib": measured.gradients / GIB,
        "state_gib": measured.state / GIB,
        "activations_gib": measured.activations / GIB,
        "peak_gib": measured.peak / GIB,
        "estimated_peak_gib": estimate.peak / GIB,
        "gradients_error_bytes": measured.gradients - estimate.gradients,
        "state_error_bytes": measured.state - estimate.state,
        "peak_ratio": measured.peak / estimate.peak,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1b", "7b", "13b"], choices=list(LLAMA_SHAPES))
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--dim", type=int, default=1, choices=[0, 1])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--csv", type=Path, default=Path("runs/compact_memory.csv"))
    args = parser.parse_args()
    result = pd.DataFrame([row(size, args) for size in args.models])
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    result.to_csv(args.csv, index=False, float_format="%.6g")
    print(f"written to {args.csv}")


if __name__ == "__main__":
    main()
