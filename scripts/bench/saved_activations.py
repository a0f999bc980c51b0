"""Count the bytes that one LLaMA block saves for backward, beside the same block trained by AdamW.

    python scripts/bench/saved_activations.py               # hidden 1,024, seconds
    python scripts/bench/saved_activations.py --hidden 256

Counted is every block of memory that autograd holds after the forward of one decoder layer without checkpointing, once
each, without parameters and buffers. ``inputs`` are those that linear layers save. ``shared`` is the default, where
layers that read one input save its columns once; ``alone`` is what each would save by itself.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory.llama import LlamaShape, llama_config

SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8)
"""Selected columns, and as many explored ones."""


def saved_bytes(block: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Bytes of everything that a forward saves, and of what linear layers save of their inputs."""
    owned = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers(), *rotary)}
    kept: dict[int, int] = {}
    inside: list[nn.Module] = []
    inputs: set[int] = set()

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
            if inside:
                inputs.add(storage.data_ptr())
        return saved

    linear = [m for m in block.modules() if isinstance(m, nn.Linear)]
    hooks: list[Any] = [m.register_forward_pre_hook(lambda m, _: inside.append(m)) for m in linear]
    hooks += [m.register_forward_hook(lambda *_: inside.clear()) for m in linear]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = block(x, position_embeddings=rotary)
    for hook in hooks:
        hook.remove()
    del y
    return sum(kept.values()), sum(kept[pointer] for pointer in inputs)


def compact(block: nn.Module, share: float) -> nn.Module:
    """A converted copy."""
    block = copy.deepcopy(block)
    grass.compact(block, rank=share, explore=share, targets="all-linear")
    return block


def measure(args: argparse.Namespace) -> pd.DataFrame:
    """One row a method."""
    shape = LlamaShape(args.hidden, args.hidden * 11 // 4 // 16 * 16, 1, args.hidden // 64)
    config = llama_config(shape, vocab_size=256, max_seq_len=args.seq_len)
    config._attn_implementation = "sdpa"
    block = LlamaDecoderLayer(config, layer_idx=0)
    x = torch.randn(args.batch_size, args.seq_len, args.hidden, requires_grad=True)
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(args.seq_len)[None])
    rows = [("adamw", 0.0, *saved_bytes(block, x, rotary))]
    for share in SHARES:
        rows.append(("grass compact", share, *saved_bytes(compact(block, share), x, rotary)))
    table = pd.DataFrame(rows, columns=["method", "share", "block_bytes", "input_bytes"])
    table["times_adamw"] = table["block_bytes"] / table["block_bytes"][0]
    table["inputs_times_adamw"] = table["input_bytes"] / table["input_bytes"][0]
    return table


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--csv", type=Path, default=Path("runs/saved_activations.csv"))
    args = parser.parse_args()
    torch.manual_seed(0)
    result = measure(args)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, hidden=args.hidden, tokens=args.batch_size * args.seq_len)


if __name__ == "__main__":
    main()
