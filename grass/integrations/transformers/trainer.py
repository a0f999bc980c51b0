"""Trainers that build a :class:`grass.GrassAdamW` and log what it does."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from grass.integrations.transformers.callback import GrassCallback
from grass.integrations.transformers.factory import GrassFactory, check_keywords, check_optim


class GrassTrainerMixin:
    """Gives any Trainer a :class:`GrassCallback` and the argument ``grass``: keywords of :class:`GrassFactory`.

    ::

        class GrassSFTTrainer(GrassTrainerMixin, SFTTrainer): ...

        trainer = GrassSFTTrainer(model, ..., grass={"rank": 0.25, "state_policy": "keep"})

    Raises:
        TypeError: ``grass`` has a key that the factory does not have.
        ValueError: another optimizer is given too, as by ``optim="adafactor"``.
    """

    def __init__(self, *arguments: Any, grass: dict[str, Any], **keywords: Any) -> None:
        check_keywords(grass)
        super().__init__(*arguments, **keywords)
        trainer: Any = self
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError("grass={...} chooses the optimizer: give neither optimizers nor optimizer_cls_and_kwargs")
        check_optim(trainer.args)
        trainer.optimizer_cls_and_kwargs = GrassFactory, {"args": trainer.args, **grass}
        trainer.add_callback(GrassCallback(trainer))


class GrassTrainer(GrassTrainerMixin, Trainer):
    """``transformers.Trainer`` with Grass: ``GrassTrainer(model, args, ..., grass={"rank": 0.25})``."""
