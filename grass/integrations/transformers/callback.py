"""A callback that logs the measures of a run and refuses layers that would not train."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grass.compact_mode.layer import CompactLayer
from grass.diagnostics import SelectionHistory
from grass.memory import state_bytes

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""What AdamW's rule and Muon's call it in their state."""

HISTORY = "GrassSelectionHistory"
"""Key of the selection history in Trainer's saved state."""


class GrassCallback(TrainerCallback):
    """Logs measures of Grass whenever Trainer logs its loss, and refuses layers that would not train.

    It logs by ``Trainer.log``, so to ``log_history`` and every reporter:

    - ``grass_turnover``, ``grass_energy`` and ``grass_coverage``, which continue in a resumed run.
      :mod:`grass.diagnostics` defines them and says when there is no energy.
    - ``grass_state_device_bytes`` and ``grass_state_host_bytes`` (:func:`grass.memory.state_bytes`).
    - ``grass_active_parameters``, the number of elements that the optimizer trains at this time.

    Args:
        trainer: the Trainer that the callback is added to.

    Raises:
        ValueError: at the start of training, if Grass trains no part of the model, or if TRL's ``BEMACallback`` or
            ``SyncRefModelCallback`` averages a converted one.
        RuntimeError: at the start of training, if layers were converted after their optimizer was built.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.history: SelectionHistory | None = None
        self.measures: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Check the optimizer and follow its selections."""
        optimizer = _inner(kw["optimizer"])
        _check_conversion(kw["model"], optimizer)
        _check_averages(self.trainer, kw["model"])
        _forget_sketches(kw["model"])
        self._close()
        self.history, self.measures = SelectionHistory(optimizer, keep=False), {}
        if HISTORY in _saved_with(state):
            self.history.load_state_dict(_saved_with(state)[HISTORY])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Measure while gradients exist, in steps after which Trainer may log."""
        unlogged = args.logging_strategy == "steps" and (state.global_step + 1) % state.logging_steps
        if self.history is not None and (state.global_step == 0 or not unlogged):
            self.measures = self.history.record()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Add the history to the state that Trainer is about to save."""
        if control.should_save and self.history is not None:
            _saved_with(state)[HISTORY] = self.history.state_dict()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Add the history also to checkpoints at the end of epochs."""
        self.on_step_end(args, state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Log the measures after Trainer has logged a training loss.

        By ``Trainer.log`` itself: a ``log`` that overrides it, as TRL's, would add its own metrics a second time.
        """
        if "loss" in kw["logs"] and self.history is not None:
            Trainer.log(self.trainer, {f"grass_{name}": value for name, value in self._metrics().items()})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Stop following."""
        self._close()

    def _metrics(self) -> dict[str, float]:
        assert self.history is not None
        states, size = self.history.optimizer.state.values(), state_bytes(self.history.optimizer)
        return {
            **{name: value for name, value in self.measures.items() if not math.isnan(value)},
            "state_device_bytes": size.device,
            "state_host_bytes": size.host,
            "active_parameters": sum(state[key].numel() for state in states for key in FIRST_MOMENTS if key in state),
        }

    def _close(self) -> None:
        if self.history is not None:
            self.history.close()
            self.history = None


def _check_averages(trainer: Trainer, model: nn.Module) -> None:
    """Refuse TRL's averages of a converted model, whose parameters in order are not those of the plain model."""
    kinds = {kind.__name__ for callback in trainer.callback_handler.callbacks for kind in type(callback).__mro__}
    pairing = kinds & {"BEMACallback", "SyncRefModelCallback"}
    if pairing and any(isinstance(module, CompactLayer) for module in model.modules()):
        raise ValueError(
            f"{pairing.pop()} pairs the parameters of two models in order, and a converted model has others: use "
            "mode='dense', or average by grass.AveragedModel"
        )


def _check_conversion(model: nn.Module, optimizer: Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CompactLayer)}
    late = [name for name, layer in layers.items() if id(layer.active) not in held]
    if late:
        raise RuntimeError(
            f"{len(late)} layers were converted after their optimizer was built and would not train "
            f"({', '.join(late)}): convert before trainer.train(), or let GrassFactory convert"
        )


def _forget_sketches(model: nn.Module) -> None:
    """Drop sketches of a run that ``auto_find_batch_size`` aborted. Trainer only zeroes the model's gradients."""
    for module in model.modules():
        if isinstance(module, CompactLayer):
            module.clear_sketch()


def _saved_with(state: TrainerState) -> dict[str, Any]:
    """The part of Trainer's state that it saves for callbacks: a dict, although annotated as a list."""
    saved: Any = state.stateful_callbacks
    return cast(dict[str, Any], saved)


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
