"""Peak memory of a model that ``fully_shard`` divides: torch's memory tracker on fake tensors against the planner.

    python scripts/bench/memory_sharded.py                        # LLaMA 60m to 13b on 8 devices
    python scripts/bench/memory_sharded.py --models 60m --gpus 2

One process stands for one of the devices. Its group is torch's fake one, whose collectives send nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import set_stance
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory import Architecture, Setting, format_bytes, plan
from grass.memory.llama import LLAMA_SHAPES, llama_config
from grass.memory.tracing import blocks_of, with_causal_attention
from grass.step_checks import StepChecks
from training.run.models import build_llama

METHODS = ("AdamW", "AdamW float32", "Grass")
"""A step of dense mode reads contents, which fake tensors do not have."""


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--models", nargs="+", default=["60m", "1b", "7b", "13b"], choices=list(LLAMA_SHAPES))
    parser.add_argument("--layers", type=int, help="blocks, instead of all")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--csv", type=Path, default=Path("runs/memory_sharded.csv"))
    args = parser.parse_args()
    setting = Setting(rank=args.rank, active_dtype=torch.bfloat16, shards=args.gpus)
    dist.init_process_group("fake", rank=0, world_size=args.gpus, store=FakeStore())
    mesh = init_device_mesh("cpu", (args.gpus,))
    rows = []
    for size in args.models:
        for method in METHODS:
            config = llama_config(size, vocab_size=32_000, max_seq_len=setting.seq_len)
            config.num_hidden_layers = args.layers or config.num_hidden_layers
            rows.append({"model": size, "method": method, "gpus": args.gpus, **row(method, config, setting, mesh)})
            write(pd.DataFrame(rows), args.csv, digits=6)
    dist.destroy_process_group()


def row(method: str, config: PretrainedConfig, setting: Setting, mesh: DeviceMesh) -> dict[str, object]:
    """Tracked and planned bytes of one case."""
    planned = plan(method, Architecture.from_config(config), setting)
    with as_one_of_several():
        tracked = track(method, config, setting, mesh)
    print(f"{method}: tracked {format_bytes(tracked)}, planned {format_bytes(planned.peak)}", flush=True)
    return {
        "layers": config.num_hidden_layers,
        "rank": setting.rank,
        "peak_gb": tracked / 1e9,
        "planned_peak_gb": planned.peak / 1e9,
        "planned_peak_at": planned.peak_at,
        "tracked_over_planned": tracked / planned.peak,
    }


def track(method: str, config: PretrainedConfig, setting: Setting, mesh: DeviceMesh) -> int:
    """The peak of one training step, after one that made the optimizer's state."""
    precise = method == "AdamW float32"
    model = build_llama(
        with_causal_attention(config),
        dtype=torch.float32 if precise else setting.dtype,
        checkpointing=setting.checkpointing,
        chunk_tokens=setting.chunk_tokens,
    )
    if method == "Grass":
        grass.compact(model, rank=setting.rank, explore=setting.explore, dim=setting.dim)
    placement = grass.distributed.shard_placement_fn(model) if method == "Grass" else None
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype if precise else None)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    optimizer: Optimizer = grass.GrassAdamW(model) if method == "Grass" else AdamW(model.parameters(), fused=True)
    ids = torch.zeros(setting.batch_size, setting.seq_len, dtype=torch.long)
    tracker = FSDPMemTracker(model, optimizer)  # type: ignore[no-untyped-call]
    for _ in range(2):
        with tracker:
            tracker.reset_mod_stats()
            model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@contextmanager
def as_one_of_several() -> Iterator[None]:
    """Fake tensors, and no comparison of settings with the other ranks, which are not there."""
    with FakeTensorMode(), set_stance("force_eager"), patch.object(StepChecks, "check_ranks"):
        yield


if __name__ == "__main__":
    main()
