"""A small GPT-2 on the bytes of Python's standard library in a plain loop. Two lines are for Grass. Needs extra ``hf``.

python examples/nanogpt_style.py --iters 300    # a second run with more --iters resumes from the checkpoint
"""

import argparse
import math
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import grass

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iters", type=int, default=300)
parser.add_argument("--checkpoint", default="nanogpt.pt")
args = parser.parse_args()
context, batch, accumulation, clip, eval_interval = 128, 8, 2, 1.0, 100
peak, floor, warmup, decay_iters = 1e-3, 1e-4, 20, 2000
device = "cuda" if torch.cuda.is_available() else "cpu"
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]


def loss_of(text: torch.Tensor, index: int) -> torch.Tensor:
    starts = torch.randint(len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(index))
    tokens = text[starts + torch.arange(context + 1)].long().to(device)
    return model(tokens, labels=tokens).loss  # shifted by one inside


torch.manual_seed(1337)
sizes = {"vocab_size": 256, "n_positions": context + 1, "n_embd": 128, "n_layer": 4, "n_head": 4}
plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **plain)).to(device)
grass.compact(model, rank=0.25)  # the first: a quarter of the columns has optimizer state
optimizer = grass.GrassAdamW(model)  # the second
saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True) if os.path.exists(args.checkpoint) else {}
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

for iteration in range(saved.get("iterations", 0), args.iters):
    progress = min(1.0, max(0.0, (iteration - warmup) / (decay_iters - warmup)))
    cosine = floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    for group in optimizer.param_groups:
        group["lr"] = cosine * min(1.0, (iteration + 1) / warmup)
    for micro in range(accumulation):
        loss = loss_of(training, iteration * accumulation + micro)
        (loss / accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    if (iteration + 1) % eval_interval == 0 or iteration + 1 == args.iters:
        with torch.no_grad():
            evaluation = sum(loss_of(held_out, index).item() for index in range(8)) / 8
        print(f"{iteration + 1}: training loss {loss.item():.4f}, held out {evaluation:.4f}")
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iterations": args.iters}
torch.save(state, args.checkpoint)
