"""Losses of a classifier of sparse inputs: which package some lines of code are from, by the words in them.

    python scripts/study/word_counts.py     # benchmarks/quality/word_counts.csv, some minutes

The first layer reads counts of 1,024 words, nearly all of them zero. Its columns are words, so few columns are few
words. Compact mode is put beside AdamW by changing one line, with and without that layer. Three linear layers of width
256, ReLU, float32, one learning rate for all parameters, no decay, linear to zero. A text is 40 lines of the standard
library; the twelve packages with most of them are the classes, every eighth text is held out. Rates run with the first
seed; the other seeds run at AdamW's best.
"""

from __future__ import annotations

import collections
import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write
from residual_mlp import optimizer_of, parse, sweep

from training.data.corpus import standard_library

LINES, WORDS, CLASSES, HELD_OUT = 40, 1024, 12, 8
STEPS, BATCH = 300, 128
RATES, AT_BEST = (5e-4, 1e-3, 2e-3, 4e-3), 1e-3
FIRST = "0"
"""Name of the layer that reads counts."""
METHODS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "AdamW": (None, ()),
    "r = q = n/4": (0.25, ()),
    "r = q = n/8": (0.125, ()),
    "n/4, first layer left out": (0.25, (FIRST,)),
    "n/8, first layer left out": (0.125, (FIRST,)),
}
"""Rank and layers that stay at full rank; a rank of ``None`` trains with torch's AdamW."""


class Texts(NamedTuple):
    """Word counts ``(texts, WORDS)``, and the packages by number."""

    counts: Tensor
    packages: Tensor

    @property
    def zeros(self) -> float:
        """The share of the counts that are zero."""
        return (self.counts == 0).double().mean().item()

    def part(self, *, held_out: bool) -> Texts:
        """The texts that are held out, or the others."""
        chosen = (torch.arange(len(self.packages)) % HELD_OUT == 0) == held_out
        return Texts(self.counts[chosen], self.packages[chosen])


def texts_of_the_library() -> Texts:
    """Parts of the files of the largest packages."""
    parts: dict[str, list[list[str]]] = {}
    for document in standard_library():
        lines, package = document.text.splitlines(), document.name.partition("/")[0]
        words = (re.findall(r"[A-Za-z_]+", " ".join(lines[at : at + LINES])) for at in range(0, len(lines), LINES))
        parts.setdefault(package, []).extend(words)
    largest = sorted(parts, key=lambda package: -len(parts[package]))[:CLASSES]
    every = [(words, number) for number, package in enumerate(largest) for words in parts[package]]
    common = collections.Counter(word for words, _ in every for word in words).most_common(WORDS)
    place = {word: number for number, (word, _) in enumerate(common)}
    counts = torch.zeros(len(every), WORDS)
    for row, (words, _) in enumerate(every):
        for word in words:
            if word in place:
                counts[row, place[word]] += 1
    return Texts(counts, torch.tensor([number for _, number in every]))


def train(
    texts: Texts, rank: float | None, exclude: tuple[str, ...], lr: float, seed: int, steps: int = STEPS
) -> float:
    """Loss on the texts held out."""
    torch.manual_seed(seed)
    widths = (WORDS, 256, 256)
    hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(256, CLASSES))
    optimizer = optimizer_of(model, rank, lr, exclude=(*exclude, str(len(hidden))))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    own, held_out = texts.part(held_out=False), texts.part(held_out=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(own.packages), (BATCH,), generator=generator)
        F.cross_entropy(model(own.counts[batch]), own.packages[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return F.cross_entropy(model(held_out.counts), held_out.packages).item()


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, __doc__, STEPS, "word_counts.csv")
    texts = texts_of_the_library()
    losses = sweep(METHODS, RATES, AT_BEST, lambda method, lr, seed: train(texts, *method, lr, seed, args.steps))
    write(losses, args.csv, steps=args.steps, zeros=round(texts.zeros, 3))


if __name__ == "__main__":
    main()
