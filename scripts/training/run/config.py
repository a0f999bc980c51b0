"""How long and how a pretraining run trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how to train.

    Attributes:
        out: directory of the run: logs and checkpoints.
        steps: optimizer steps.
        warmup: steps of linear warm-up; a cosine to the final learning rate follows.
        final_lr: learning rate of the last step, as a share of the peak.
        accumulate: batches per step.
        deal: sequences of each process in a batch, or ``("auto",)``, which measures how to divide the sequences of a
            step; empty for equal parts.
        clip: largest norm of the gradient; 0 does not clip.
        step_in_backward: step each parameter in backward (:func:`grass.step_in_backward`), for grass in dense mode on
            one process. ``clip`` then limits each parameter's gradient.
        autocast: compute in bfloat16 over the weights' own dtype.
        eval_every: steps between evaluations; the last step is always followed by one.
        log_every: steps between logged rows.
        save_every: steps between checkpoints; 0 saves only on a stop and at the end.
    """

    out: Path
    steps: int = 1000
    warmup: int = 100
    final_lr: float = 0.1
    accumulate: int = 1
    deal: Sequence[int | str] = ()
    clip: float = 1.0
    step_in_backward: bool = False
    autocast: bool = False
    eval_every: int = 100
    log_every: int = 1
    save_every: int = 500

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "eval_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"Invalid {name}={getattr(self, name)}: must be >= 1")
        for name in ("clip", "save_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}={getattr(self, name)}: must be >= 0")
        if self.step_in_backward and self.accumulate > 1:
            raise ValueError(f"Invalid accumulate={self.accumulate}: must be 1 with step_in_backward=True")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"Invalid warmup={self.warmup}: must be in [0, steps={self.steps})")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"Invalid final_lr={self.final_lr}: must be in [0, 1], a share of the peak")
