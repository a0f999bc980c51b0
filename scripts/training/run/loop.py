"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm
from transformers import PreTrainedModel, get_cosine_with_min_lr_schedule_with_warmup

from grass import GrassAdamW, step_in_backward
from grass.distributed.uneven.gradients import synchronised
from grass.in_backward import InBackward
from grass.memory import StateBytes, state_bytes
from grass.parallel.ranks import Ranks
from training.data.blocks import Data
from training.run.checkpoint import CheckpointStore
from training.run.config import TrainConfig
from training.run.dealing import divided, follow, is_packed, weight_of
from training.run.metrics import Clock, MetricsLog, NoLog, gradient_bytes
from training.run.processes import (
    Processes,
    data_parallel,
    load_optimizer_state,
    whole_optimizer_state,
    whole_weights,
)
from training.run.setup import write_setup
from training.run.signals import GracefulStop

SHOWN = ("loss", "eval_loss", "tokens_per_second")
"""Columns shown beside the progress bar."""


class Result(NamedTuple):
    """What a run came to.

    Attributes:
        step: steps done.
        eval_loss: mean cross-entropy on the held-out blocks at the last evaluation, nats per token; NaN before it.
        tokens_per_second: of training alone, without evaluation and checkpoints.
        state_bytes: held by the optimizer.
        gradient_bytes: held by the model after the last backward pass.
    """

    step: int
    eval_loss: float
    tokens_per_second: float
    state_bytes: StateBytes
    gradient_bytes: int


@dataclass
class Trainer:
    """Trains a model, one object per run.

    Args:
        model: on its device, in its dtype; of several processes each holds a replica, or its shards.
        optimizer: over the model's parameters.
        data: batches and held-out blocks.
        config: the loop's settings.
        checkpoints: where to save; ``None`` saves nothing.
        settings: plain values saved with each checkpoint; :meth:`resume` refuses one with other values.
        processes: those that train the model.
    """

    model: PreTrainedModel
    optimizer: Optimizer
    data: Data
    config: TrainConfig
    checkpoints: CheckpointStore | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: Processes = field(default_factory=Processes)
    step: int = field(default=0, init=False)
    saved_step: int | None = field(default=None, init=False)
    eval_loss: float = field(default=float("nan"), init=False)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.parallel = data_parallel(self.model, self.optimizer, self.processes)
        self.deal = divided(self.config, self.data.train, self.processes, self.parallel, self.optimizer, self._work)
        self.in_backward = self._step_in_backward() if self.config.step_in_backward else None
        self.scheduler = self._schedule()

    def _schedule(self) -> LRScheduler:
        """The schedule, at the steps done: it sets the learning rate of the next one."""
        schedule: LRScheduler = get_cosine_with_min_lr_schedule_with_warmup(
            self.optimizer,
            self.config.warmup,
            self.config.steps,
            min_lr_rate=self.config.final_lr,
            last_epoch=self.step - 1,
        )
        return schedule

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all processes in a step."""
        return self.deal.division.batch * self.data.train.seq_len

    def run(self) -> Result:
        """Train to the last step, or to the end of the step in which SIGTERM or SIGINT arrives; save either way.

        Several processes agree after each step.

        Raises:
            FloatingPointError: the gradient is not finite; seen at logged steps and before a checkpoint, on every rank.
        """
        log = MetricsLog(self.config.out, self.step) if self.processes.is_main else NoLog()
        bar = tqdm(
            total=self.config.steps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not self.processes.is_main,
        )
        clock = Clock()
        with closing(log), bar, GracefulStop() as stop:
            while self.step < self.config.steps and not self.processes.any(stop.requested):
                row = self._logged_step(clock)
                if self._due(self.config.eval_every):
                    row["eval_loss"] = self.eval_loss = self.evaluate()
                if row:
                    log.write({"step": self.step, "tokens": self.step * self.tokens_per_step, **row})
                    bar.set_postfix({name: f"{row[name]:.4g}" for name in SHOWN if name in row}, refresh=False)
                bar.update()
                if self._due(self.config.save_every):
                    self.save()
            if self.saved_step != self.step:
                self.save()
        if self.processes.is_main:
            write_setup(self.config.out, self.model, self.optimizer)
        rate = clock.steps * self.tokens_per_step / clock.seconds if clock.steps else 0.0
        return Result(self.step, self.eval_loss, rate, state_bytes(self.optimizer), gradient_bytes(self.model))

    def _due(self, interval: int) -> bool:
        return self.step == self.config.steps or (interval > 0 and self.step % interval == 0)

    def _logged_step(self, clock: Clock) -> dict[str, float]:
        """One step, and what is to be logged of it."""
        learning_rate = float(self.scheduler.get_last_lr()[0])
        with clock:
            loss, norm = self.train_step()
            if not (self._due(self.config.log_every) or self._due(self.config.save_every)):
                return {}
            row = {"loss": self._mean(loss), "grad_norm": norm.item(), "lr": learning_rate}
        if not math.isfinite(row["grad_norm"]):
            raise FloatingPointError(f"The gradient's norm is {row['grad_norm']} in step {self.step}")
        return {**row, "tokens_per_second": self.tokens_per_step / clock.lap()}

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Backward over the batches of a step, clip, update: the mean loss and the norm of the gradient."""
        self.model.train()
        self.optimizer.zero_grad()
        losses, weight = [], weight_of(self.deal)
        for i in range(self.deal.division.micro_batches):
            with self.deal.synced(self.parallel, i):
                loss = self._loss(next(self.data.train)) * weight
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = self._clip() if self.in_backward is None else self.in_backward.grad_norm
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        if self.deal.end_step(self.step) and is_packed(self.data.train):
            follow(self.deal, self.data.train)
        return torch.stack(losses).sum(), norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _work(self, size: int) -> None:
        """Forward and backward of so many sequences, to be timed."""
        self.model.train()
        assert is_packed(self.data.train)
        with synchronised(self.parallel, Ranks.of(None), isinstance(self.model, FSDPModule)):
            self._loss(self.data.train.sequences(0, size)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def _step_in_backward(self) -> InBackward:
        if not isinstance(self.optimizer, GrassAdamW):
            raise ValueError(f"step_in_backward=True takes grass's optimizer, got {type(self.optimizer).__name__}")
        return step_in_backward(self.optimizer, max_norm=self.config.clip or math.inf)

    def _clip(self) -> Tensor:
        """Clip the whole gradient; returns its norm before."""
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.config.clip:
            clip_grads_with_norm_(self.model.parameters(), self.config.clip, norm)
        return norm

    def _mean(self, loss: Tensor) -> float:
        """The mean over the processes."""
        return self.processes.sum(loss).item() / self.processes.size

    def _loss(self, batch: Tensor, model: nn.Module | None = None) -> Tensor:
        """Mean cross-entropy of the next token, in float32."""
        batch = batch.to(self.device, non_blocking=True)
        inputs, targets = batch[:, :-1], batch[:, 1:].contiguous()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast):
            loss: Tensor = (model or self.parallel)(input_ids=inputs, labels=targets, shift_labels=targets).loss
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out blocks, each evaluated by one of the processes."""
        self.model.train(False)
        batches = torch.split(self.data.eval_blocks, min(self.deal.division.sizes))
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for first in range(0, len(batches), self.processes.size):  # sharded models need every process in each forward
            mine = first + self.processes.rank
            batch = batches[min(mine, len(batches) - 1)]
            total += self._loss(batch, self.model) * (len(batch) if mine < len(batches) else 0)
        return self.processes.sum(total).item() / len(self.data.eval_blocks)

    def save(self) -> None:
        """Write a checkpoint, if the run has a place for them."""
        if self.checkpoints is not None:
            weights, optimizer = whole_weights(self.model), whole_optimizer_state(self.model, self.optimizer)
            positions = self.processes.gather((self.data.train.state_dict(), torch.get_rng_state()))
            state = {
                "step": self.step,
                "eval_loss": self.eval_loss,
                "optimizer": optimizer,
                "data": [data for data, _ in positions],
                "rng": [rng for _, rng in positions],
                "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "settings": self._settings(),
                "warmup": self.config.warmup,
            }
            if self.processes.is_main:
                self.checkpoints.save(self.step, self.model, state, weights)
            self.processes.any(False)  # nobody goes on, or exits, before it is written
        self.saved_step = self.step

    def resume(self) -> bool:
        """Go on from the newest complete checkpoint; ``False`` if there is none.

        Its warm-up stays, however many steps the run has now.

        Raises:
            ValueError: the checkpoint was made with other settings, or every checkpoint is damaged.
        """
        path = self.checkpoints.latest() if self.checkpoints is not None else None
        if self.checkpoints is None or path is None:
            return False
        state = self.checkpoints.load(path, self.model)
        settings = self._settings()
        changed = {k: v for k, v in state["settings"].items() if settings.get(k) != v}
        if changed:
            given = {name: settings.get(name) for name in changed}
            raise ValueError(f"{path} was made with {changed}, not with {given}")
        self.step = self.saved_step = state["step"]
        self.eval_loss = state["eval_loss"]
        load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        self.config = replace(self.config, warmup=state.get("warmup", self.config.warmup))
        self.scheduler = self._schedule()
        saved = self.processes.rank % len(state["rng"])  # more processes than were saved take a position of others
        self.data.train.load_state_dict(state["data"][saved])
        torch.set_rng_state(state["rng"][saved])
        torch.cuda.set_rng_state_all(state["cuda_rng"][: torch.cuda.device_count()])
        return True

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must have too. Streams are read by as many processes, files by any."""
        sequences = {"sequences per step": self.deal.division.batch}
        return {
            **self.settings,
            **sequences,
            **({} if is_packed(self.data.train) else {"processes": self.processes.size}),
        }
