"""Peak memory of training steps: torch's memory tracker on fake tensors of full size against the planner.

    python scripts/bench/memory.py                               # every case of CASES, some minutes
    python scripts/bench/memory.py --models 60m --rank 64

Neither the memory nor a GPU is needed. What a step holds on a GPU beside this is the allocator's slack.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from memory_tracking import track

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.memory import METHODS, Architecture, Setting, format_bytes, plan
from grass.memory.llama import LLAMA_SHAPES, llama_config
from grass.memory.planner import peaks

CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("Grass", {}, False),
    ("Grass", {"selection": "multinomial_norm"}, True),
    ("Grass", {"explore": 0}, False),
    ("Grass", {"checkpointing": False, "chunk_tokens": 0}, False),
    ("Grass", {"rank": 1 / 8, "explore": 1 / 32, "active_dtype": torch.bfloat16, "moment_dtype": "8bit"}, False),
    ("Grass int8", {"moment_dtype": "8bit"}, False),
    ("Grass int8", {"moment_dtype": "8bit", "selection": "multinomial_norm"}, True),
    ("AdamW", {}, False),
    ("8-bit AdamW", {}, False),
    ("LoRA", {"lora_rank": 256}, False),
    ("GaLore", {}, False),
]
"""Method, what differs from checkpointed layers and a chunked loss, and whether the step gathers a sketch."""


def row(size: str, method: str, setting: Setting, refresh: bool) -> dict[str, object]:
    """Tracked and planned bytes of one case."""
    config = llama_config(size, vocab_size=32_000, max_seq_len=setting.seq_len)
    model, measured = Architecture.from_config(config), track(method, config, setting, refresh=refresh)
    planned = max(peaks(METHODS[method](model, setting), model, setting, refresh=refresh).values())
    print(f"{size} {method}: tracked {format_bytes(measured.peak)}, planned {format_bytes(planned)}", flush=True)
    return {
        "model": size,
        "method": method,
        "rank": setting.rank,
        "explore": "as rank" if setting.explore is None else setting.explore,
        "selection": setting.selection,
        "dim": setting.dim,
        "batch_size": setting.batch_size,
        "seq_len": setting.seq_len,
        "checkpointing": setting.checkpointing,
        "chunk_tokens": setting.chunk_tokens,
        "policy": setting.state_policy,
        "rows": str(setting.active_dtype).removeprefix("torch."),
        "moments": setting.moment_dtype,
        "refresh": refresh,
        **{f"{name}_gb": value / 1e9 for name, value in measured._asdict().items()},
        "planned_host_gb": plan(method, model, setting).bank / 1e9,
        "planned_peak_gb": planned / 1e9,
        "planned_total_gb": plan(method, model, setting).total / 1e9,
        "tracked_over_planned": measured.peak / planned,
    }


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--models", nargs="+", default=["60m", "350m", "1b", "7b", "13b"], choices=list(LLAMA_SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--csv", type=Path, default=Path("runs/memory.csv"))
    args = parser.parse_args()
    setting = Setting(rank=args.rank, seq_len=args.seq_len)
    rows = []
    for size in args.models:
        for method, changes, refresh in (case for case in CASES if case[0] in args.methods):
            rows.append(row(size, method, replace(setting, **changes), refresh))
            write(pd.DataFrame(rows), args.csv, digits=6)


if __name__ == "__main__":
    main()
