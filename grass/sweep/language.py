"""The trial of ``python -m grass.sweep``: a short complete training of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.conversion import compact
from grass.extras import optional
from grass.groups import param_groups
from grass.optimizer import GrassAdamW

WARMUP, FLOOR = 0.1, 0.1
"""Share of the steps in which the rates rise; what the cosine after it falls to."""

EVALUATIONS = 10
"""Times that the held-out loss is computed, at equal distances."""

CLIP = 1.0
BYTES = 256
TOKENIZERS = ("tokenizer*", "vocab*", "*.model")
"""Files that a directory with a tokenizer has."""


@dataclass(frozen=True)
class LanguageModel:
    """Train a model of transformers on text; yield its held-out loss ten times.

    The last tenth of the text is held out. All trials see the same batches, from the same first weights.

    Args:
        model: a directory or a name that transformers loads.
        data: text files.
        steps: of a trial.
        rank: a fraction of the columns.
        explore: a fraction of the columns, or ``None`` for the default of the mode.
        dense: dense mode instead of compact mode.
        scratch: random weights from the model's configuration instead of pretrained ones.
        batch_size: windows per step.
        seq_len: tokens per window.
        eval_windows: windows of the held-out loss, at most.
        dtype: of the weights.
        seed: of first weights, batches and selection.
    """

    model: str
    data: tuple[str, ...]
    steps: int
    rank: float = 0.25
    explore: float | None = None
    dense: bool = False
    scratch: bool = False
    batch_size: int = 8
    seq_len: int = 256
    eval_windows: int = 64
    dtype: str = "float32"
    seed: int = 0

    def __call__(self, lr: float, scale: float, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
        """Train with these rates."""
        training, heldout = self.windows()
        model = self.load().to(device).train()
        optimizer = self.optimizer(model, lr, scale)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        draws = torch.Generator().manual_seed(self.seed)
        marks = {round(self.steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)}
        for step in range(1, self.steps + 1):
            chosen = torch.randint(len(training), (self.batch_size,), generator=draws)
            loss = _loss(model, training[chosen].to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step in marks or not loss.isfinite():
                yield step, self.evaluate(model, heldout, device)

    def windows(self) -> tuple[Tensor, Tensor]:
        """Token ids ``(windows, seq_len)`` for training and evaluation.

        Raises:
            OSError: a file cannot be read.
            ValueError: the text is too short, or the model has no tokenizer and too few tokens for bytes.
        """
        text = "\n".join(Path(file).read_text(encoding="utf-8", errors="replace") for file in self.data)
        if not text.strip():
            raise ValueError(f"There is no text in {', '.join(self.data)}")
        self.config()
        ids = self.encode(text)
        count = len(ids) // self.seq_len
        heldout = min(max(count // 10, 1), self.eval_windows)
        if count < 2:
            raise ValueError(f"The text has {len(ids)} tokens: needs at least {2 * self.seq_len}, two of --seq-len")
        every = ids[: count * self.seq_len].view(count, self.seq_len)
        return every[: count - max(count // 10, 1)], every[count - heldout :]

    def encode(self, text: str) -> Tensor:
        """Token ids of the model's tokenizer, or bytes if its directory has none."""
        transformers = optional("transformers", "python -m grass.sweep")
        directory = Path(self.model)
        if not directory.is_dir() or any(file for pattern in TOKENIZERS for file in directory.glob(pattern)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
            return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if (size := self.config().get_text_config().vocab_size) < BYTES:
            raise ValueError(f"{self.model} has no tokenizer, and its {size} tokens are too few for the {BYTES} bytes")
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def config(self) -> Any:
        """The model's configuration.

        Raises:
            ValueError: transformers finds none.
        """
        try:
            return optional("transformers", "python -m grass.sweep").AutoConfig.from_pretrained(self.model)
        except OSError as error:
            raise ValueError(f"No model {self.model!r}: must be a directory with a config.json, or a name") from error

    def load(self) -> Any:
        """The model, with the same weights each time."""
        transformers = optional("transformers", "python -m grass.sweep")
        dtype = getattr(torch, self.dtype)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            if self.scratch:
                return transformers.AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
            return transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)

    def optimizer(self, model: nn.Module, lr: float, scale: float) -> GrassAdamW:
        """What :meth:`lines` says."""
        options: dict[str, Any] = {} if self.explore is None else {"explore": self.explore}
        if self.dense:
            groups = param_groups(model, self.rank, **options)
            return GrassAdamW(groups, lr=lr, scale=scale, seed=self.seed)
        compact(model, rank=self.rank, seed=self.seed, **options)
        return GrassAdamW(model, lr=lr, scale=scale, seed=self.seed)

    def lines(self, lr: float, scale: float) -> str:
        """The code that trains with these rates."""
        options = f"rank={float(self.rank)}" + ("" if self.explore is None else f", explore={float(self.explore)}")
        seed = f", seed={self.seed}" if self.seed else ""
        rates = f"{lr=}, {scale=}{seed}"
        if self.dense:
            return f"optimizer = grass.GrassAdamW(grass.param_groups(model, {options}), {rates})"
        return f"grass.compact(model, {options}{seed})\noptimizer = grass.GrassAdamW(model, {rates})"

    def auto_scale(self) -> float:
        """What ``scale="auto"`` is: ``n / (r + q)``, or 1 without explored columns."""
        explored = self.explore
        if explored is None:
            explored = 1.0 if self.dense else self.rank
        return 1 / min(1.0, self.rank + explored) if explored else 1.0

    def factor(self, step: int) -> float:
        """What the rates are multiplied by: a linear rise, then a cosine."""
        warmup = max(1, round(WARMUP * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, heldout: Tensor, device: str) -> float:
        """The mean loss of the held-out windows."""
        model.eval()
        batches = torch.split(heldout, self.batch_size)
        total = sum(float(_loss(model, batch.to(device))) * len(batch) for batch in batches)
        model.train()
        return total / len(heldout)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss
