"""LLaMA 13B and 7B training within a capped part of a GPU's memory: 20 steps with a refresh inside and falling loss.

    python scripts/bench/capped_training.py --out benchmarks/gpu      # 13B in 40 and 24 GB, 7B in 24 and 12 GB
    python scripts/bench/capped_training.py --smoke                   # tiny, on the tests' stand-in accelerator

``torch.cuda.set_per_process_memory_fraction`` makes every allocation beyond the cap fail as on a smaller card; GB are
10^9 bytes. With ``--smoke`` the cap is a tenth above the planned peak; the CPU, where there is no stand-in, has none.
The CSV puts the peak beside the planner's. A loss that does not fall, or a peak that is more than 5% off the plan, ends
with an error. Tokens are the bytes of the Python standard library under a vocabulary of 32,000.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parent / "kernels"))
from harness import machine, step_device

from grass.command_line import ArgumentParser
from grass.memory import Architecture, Setting, parse_bytes, plan
from grass.memory.llama import llama_config

sys.path.append(str(Path(__file__).parents[1]))
from training.data.blocks import Batches, DataConfig
from training.data.loading import load_data
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig, build_optimizer, convert

STEPS, REFRESH_EVERY, TOLERANCE = 20, 8, 0.05


@dataclass(frozen=True)
class Case:
    """A model, the memory that it is to train in, and how: as its recipe, with 8-bit moments and bfloat16 rows."""

    model: str
    cap: str
    rank: int
    explore: int
    weights: str | None = None
    lr: float = 1e-4  # without a warm-up; 1e-3 made LLaMA 13B diverge

    def setting(self, seq_len: int = 2048) -> Setting:
        """What the planner is asked."""
        return Setting(
            rank=self.rank,
            explore=self.explore,
            seq_len=seq_len,
            moment_dtype="8bit",
            active_dtype=torch.bfloat16,
        )


CASES = {
    "13b_40gb": Case("13b", "40GB", 640, 160),
    "13b_24gb": Case("13b", "24GB", 448, 112, "int8"),
    "7b_24gb": Case("7b", "24GB", 640, 160),
    "7b_12gb": Case("7b", "12GB", 288, 72, "int8"),
}


@contextmanager
def capped(device: str, nbytes: int) -> Iterator[None]:
    """Let allocations beyond so many bytes fail; the CPU's do not."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
    if device != "standin":
        yield
        return
    from tests.accelerator import standin

    with standin.budget(nbytes):
        yield


def run(case: Case, seq_len: int, device: str) -> dict[str, object]:
    """Train 20 steps under the cap; what came of it."""
    accelerated = device != "cpu"
    if accelerated:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    batches = load_data(DataConfig(batch_size=1, seq_len=seq_len)).train
    setting = case.setting(seq_len)
    config = llama_config(case.model, vocab_size=32_000, max_seq_len=seq_len)
    planned = plan("Grass int8" if case.weights else "Grass", Architecture.from_config(config), setting)
    cap = parse_bytes(case.cap) if device == "cuda" else int(planned.peak * (1 + 2 * TOLERANCE))
    with capped(device, cap):
        losses, seconds = train(case, config, setting, batches, device)
    peak = torch.accelerator.max_memory_allocated() if accelerated else 0
    return {
        **vars(case),
        "seq_len": seq_len,
        "steps": len(losses),
        "refreshes": STEPS // REFRESH_EVERY,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_seconds": seconds,
        "tokens_per_s": seq_len / seconds,
        "peak_bytes": peak,
        "reserved_bytes": torch.accelerator.max_memory_reserved() if accelerated else 0,
        "cap_bytes": cap,
        "planned_peak_bytes": planned.peak,
        "planned_total_bytes": planned.total,
        "peak_over_planned": peak / planned.peak,
    }


def train(case: Case, config: object, setting: Setting, batches: Batches, device: str) -> tuple[list[float], float]:
    """The losses of the steps, of the model that the recipes train, and the seconds of the median step."""
    options = OptimizerConfig(
        lr=case.lr,
        rank=case.rank,
        explore=case.explore,
        dim=setting.dim,
        compact=True,
        active_dtype="bfloat16",
        stochastic_rounding=device != "standin",  # there torch rounds, with temporaries that kernels do not have
        weights=case.weights,
        moment_dtype=setting.moment_dtype,
        state_policy=setting.state_policy,
        selection=setting.selection,
        update_interval=REFRESH_EVERY,
    )
    model = build_llama(
        config,
        dtype=setting.dtype,
        device=device,
        checkpointing=setting.checkpointing,
        chunk_tokens=setting.chunk_tokens,
        convert=partial(convert, config=options) if case.weights else None,
    )
    model.train()
    optimizer = build_optimizer(model, options)
    losses, times = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        batch = next(batches).to(device)
        targets = batch[:, 1:].contiguous()
        loss = model(input_ids=batch[:, :-1], labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step
        times.append(time.perf_counter() - begin)
    refreshed = {state["refreshes"] for state in optimizer.state.values() if "indices" in state}
    assert refreshed == {1 + STEPS // REFRESH_EVERY}, f"{refreshed} selections instead of {1 + STEPS // REFRESH_EVERY}"
    return losses, statistics.median(times)


def complaints(row: dict[str, object], accelerated: bool) -> list[str]:
    """What is not as it should be."""
    found = []
    if not row["last_loss"] < row["first_loss"]:
        found.append(f"the loss went from {row['first_loss']:.3f} to {row['last_loss']:.3f}")
    if accelerated and abs(row["peak_over_planned"] - 1) > TOLERANCE:
        found.append(f"the peak is {row['peak_over_planned']:.3f} of the plan")
    return [f"{row['model']} in {row['cap']}: {what}" for what in found]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu"))
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU, or --smoke")
    device, rows, wrong = step_device() if args.smoke else "cuda", [], []
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.cases:
        case = CASES[name]
        row = run(
            replace(case, model="1m", rank=16, explore=4, lr=1e-3) if args.smoke else case,
            32 if args.smoke else 2048,
            device,
        )
        rows.append(row | machine())
        wrong += complaints(row, accelerated=device != "cpu")
        print(
            f"{name}: loss {row['first_loss']:.3f} to {row['last_loss']:.3f}, peak {row['peak_bytes']:,} bytes",
            flush=True,
        )
        pd.DataFrame(rows).to_csv(args.out / "capped_training.csv", index=False, float_format="%.5g")
        gc.collect()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
