"""Trainers that build an optimizer of Grass and log what it does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from grass.integrations.transformers.callback import GrassCallback
from grass.integrations.transformers.factory import GrassFactory, check_keywords, check_optim
from grass.integrations.transformers.uneven import Sizes, UnevenTraining


class GrassTrainerMixin:
    """Gives any Trainer a :class:`GrassCallback` and the argument ``grass``: keywords of :class:`GrassFactory`.

    ::

        class GrassSFTTrainer(GrassTrainerMixin, SFTTrainer): ...

        trainer = GrassSFTTrainer(model, ..., grass={"rank": 0.125, "state_policy": "keep"})

    ``deal=[11, 5]`` gives the first of two processes 11 samples of each micro-batch and the second 5; ``deal="auto"``
    measures how many (:mod:`grass.distributed.uneven`).

    Raises:
        TypeError: ``grass`` has a key that the factory does not have.
        ValueError: another optimizer is given too, as by ``optim="adafactor"``; or ``deal`` with ``optimizer="muon"``.
    """

    def __init__(self, *arguments: Any, grass: dict[str, Any], deal: Sizes | None = None, **keywords: Any) -> None:
        check_keywords(grass)
        if deal is not None and grass.get("optimizer", "adamw") != "adamw":
            raise ValueError(f"Invalid {deal=} with optimizer={grass['optimizer']!r}: uneven parts take 'adamw'")
        super().__init__(*arguments, **keywords)
        trainer: Any = self
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError("grass={...} chooses the optimizer: give neither optimizers nor optimizer_cls_and_kwargs")
        check_optim(trainer.args)
        by_trainer = {"args": trainer.args, "decay_names": trainer.get_decay_parameter_names}
        trainer.optimizer_cls_and_kwargs = GrassFactory, {**by_trainer, **grass}
        trainer.add_callback(GrassCallback(trainer))
        self._uneven = None if deal is None else UnevenTraining(trainer, deal)
        if self._uneven is not None:
            trainer.add_callback(self._uneven)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Trainer's loader, with uneven batches if ``deal`` was given."""
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        return loader if self._uneven is None else self._uneven.loader(loader)

    def training_step(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
        """Trainer's forward and backward of one micro-batch, timed if ``deal`` was given."""
        deal, trainer = None if self._uneven is None else self._uneven.deal, self
        with nullcontext() if deal is None else deal.timed(model, is_last=trainer.accelerator.sync_gradients):  # type: ignore[attr-defined]
            loss: Tensor = super().training_step(model, *arguments, **keywords)  # type: ignore[misc]
        return loss

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of a step, of all processes."""
        if self._uneven is not None and self._uneven.deal is not None:
            return self._uneven.deal.division.batch
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total


class GrassTrainer(GrassTrainerMixin, Trainer):
    """``transformers.Trainer`` with Grass: ``GrassTrainer(model, args, ..., grass={"rank": 0.125})``."""
