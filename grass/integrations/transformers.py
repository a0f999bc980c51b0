"""Hugging Face's Trainer: a factory that builds the optimizer, a callback that logs and checks, and both in one word.

::

    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=(GrassFactory, {"args": args, "rank": 0.25}))
    trainer.add_callback(GrassCallback(trainer))

or, the same,

::

    trainer = GrassTrainer(model, args, ..., grass={"rank": 0.25})

Trainer calls the factory after it has loaded the weights of a checkpoint to resume from and before it wraps the model
for DDP or FSDP2 or compiles it: the moment to convert.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from inspect import signature
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import check_target_module_exists

from grass.compact_mode.conversion import compact
from grass.compact_mode.layer import CompactLayer
from grass.diagnostics import SelectionHistory
from grass.groups import param_groups
from grass.memory import state_bytes
from grass.optimizer import GrassAdamW
from grass.targets import Targets, is_linear

CONVERSION = ("explore", "dim", "dtype", "calibration")
"""Keywords of the factory that go to :func:`grass.compact` in compact mode; the others are the optimizer's."""


HISTORY = "GrassSelectionHistory"
"""Where in Trainer's saved state the history of selections is."""


class GrassFactory:
    """Builds :class:`grass.GrassAdamW` for ``Trainer(optimizer_cls_and_kwargs=(GrassFactory, {...}))``."""

    def __call__(
        self,
        model: nn.Module,
        *,
        args: TrainingArguments | None = None,
        mode: str = "compact",
        rank: int | float | None = None,
        targets: Targets = None,
        exclude: Targets = (),
        **keywords: Any,
    ) -> GrassAdamW:
        """Convert ``model`` where that is asked for, and build its optimizer; norms and biases do not decay.

        Args:
            model: any module that is not wrapped yet.
            args: ``learning_rate``, ``weight_decay``, ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``, ``seed`` and
                ``optim_target_modules`` of these hold wherever no keyword says otherwise. As in Trainer, a target in a
                list may be any part of a module's name; unlike there, ``"all-linear"`` leaves output heads out.
            mode: ``"compact"``, the default, which converts the model and needs the least memory; or ``"dense"``, which
                leaves the model as it is and forms full gradients.
            rank: rows to train per weight, a number or a fraction; ``None`` takes a model converted before.
            targets: as in :func:`grass.matched_modules`.
            exclude: likewise.
            keywords: any other argument of :class:`grass.GrassAdamW` and, in compact mode, ``explore``, ``dim``,
                ``dtype`` and ``calibration`` of :func:`grass.compact`. For its ``weights="int8"`` convert before
                Trainer is made.

        Raises:
            TypeError: a keyword is none of these.
            ValueError: a value is out of range, nothing matches, or ``mode`` and ``rank`` do not fit the model.
            RuntimeError: DDP or FSDP has wrapped the model: it is too late to convert it.
        """
        check_keywords(keywords)
        if keywords.pop("weights", None) is not None:
            raise ValueError(
                "Trainer loads a checkpoint before it calls this factory, into a model without a place for int8 codes: "
                "call grass.compact(model, ...) before Trainer is made, and leave rank and weights out here"
            )
        keywords = {**_from_arguments(args), **keywords}
        targets = _targets(model, args) if targets is None else targets
        _check_mode(model, mode, rank)
        if rank is None:
            groups: list[dict[str, Any]] = [{"params": _trainable(model)}]
        elif mode == "dense":
            groups = param_groups(model, rank, targets=targets, exclude=exclude)
        else:
            conversion = {key: keywords.pop(key) for key in CONVERSION if key in keywords}
            compact(model, rank=rank, targets=targets, exclude=exclude, seed=keywords.get("seed", 0), **conversion)
            groups = [{"params": _trainable(model)}]
        return GrassAdamW(_split_by_decay(model, groups), **keywords)


class GrassCallback(TrainerCallback):
    """Logs what Grass does whenever Trainer logs its loss, and refuses to train what Grass would not reach.

    It logs through ``Trainer.log``, and so to ``log_history`` and every reporter: ``grass_turnover``, ``grass_energy``
    and ``grass_coverage`` (:class:`grass.diagnostics.SelectionHistory`; a resumed run counts on),
    ``grass_state_device_bytes`` and ``grass_state_host_bytes`` (:func:`grass.memory.state_bytes`), and
    ``grass_active_parameters``, how many elements the optimizer trains at this time.

    Args:
        trainer: the one it is added to.

    Raises:
        ValueError: at the start of training, if Grass trains no part of the model.
        RuntimeError: then, if layers were converted after their optimizer was built.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.history: SelectionHistory | None = None
        self.measures: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Check the optimizer against the model and begin to follow its selections."""
        optimizer = _inner(kw["optimizer"])
        _check_conversion(kw["model"], optimizer)
        _forget_sketches(kw["model"])
        self._close()
        self.history, self.measures = SelectionHistory(optimizer, keep=False), {}
        if HISTORY in _saved_with(state):
            self.history.load_state_dict(_saved_with(state)[HISTORY])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Measure while there are gradients, in the steps after which Trainer may log."""
        unlogged = args.logging_strategy == "steps" and (state.global_step + 1) % state.logging_steps
        if self.history is not None and (state.global_step == 0 or not unlogged):
            self.measures = self.history.record()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Put the history into the state that Trainer is about to save."""
        if control.should_save and self.history is not None:
            _saved_with(state)[HISTORY] = self.history.state_dict()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Likewise, where checkpoints are made at the end of epochs."""
        self.on_step_end(args, state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Log in turn, if these are logs of training."""
        if "loss" in kw["logs"] and self.history is not None:
            self.trainer.log({f"grass_{name}": value for name, value in self._metrics().items()})

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
            "active_parameters": sum(state["exp_avg"].numel() for state in states if "exp_avg" in state),
        }

    def _close(self) -> None:
        if self.history is not None:
            self.history.close()
            self.history = None


class GrassTrainerMixin:
    """Gives any Trainer the argument ``grass``, the keywords of :class:`GrassFactory`, and a :class:`GrassCallback`.

    ::

        class GrassSFTTrainer(GrassTrainerMixin, SFTTrainer): ...

        trainer = GrassSFTTrainer(model, ..., grass={"rank": 0.25, "state_policy": "keep"})

    Raises:
        TypeError: ``grass`` has another key than the factory's keywords.
        ValueError: another optimizer is given too.
    """

    def __init__(self, *arguments: Any, grass: dict[str, Any], **keywords: Any) -> None:
        check_keywords(grass)
        super().__init__(*arguments, **keywords)
        trainer: Any = self
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError("grass={...} chooses the optimizer: give neither optimizers nor optimizer_cls_and_kwargs")
        trainer.optimizer_cls_and_kwargs = GrassFactory, {"args": trainer.args, **grass}
        trainer.add_callback(GrassCallback(trainer))


class GrassTrainer(GrassTrainerMixin, Trainer):
    """``transformers.Trainer`` with Grass: ``GrassTrainer(model, args, ..., grass={"rank": 0.25})``."""


def check_keywords(given: Iterable[str]) -> None:
    """Refuse what :class:`GrassFactory` has no use for.

    Raises:
        TypeError: naming the keyword, one like it, and all there are.
    """
    own, optimizer = signature(GrassFactory.__call__).parameters, signature(GrassAdamW).parameters
    allowed = {*own, *optimizer, *CONVERSION, "weights"} - {"self", "model", "params", "keywords"}
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            raise TypeError(
                f"Grass has no option {name!r}{f', did you mean {close[0]!r}?' if close else ''}: must be one of "
                f"{', '.join(sorted(allowed))}"
            )


def _from_arguments(args: TrainingArguments | None) -> dict[str, Any]:
    if args is None:
        return {}
    return {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
    }


def _targets(model: nn.Module, args: TrainingArguments | None) -> Targets:
    """``optim_target_modules``, with Trainer's own reading of it, as a pattern for :func:`grass.matched_modules`."""
    wanted = None if args is None else args.optim_target_modules
    if wanted is None or wanted in ("all-linear", "all_linear"):
        return wanted and "all-linear"
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    names = [name for name in linear if check_target_module_exists(wanted, name)]
    return "|".join(map(re.escape, names)) or wanted  # nothing matches: the error is to name what was wanted


def _check_mode(model: nn.Module, mode: str, rank: int | float | None) -> None:
    if mode not in ("compact", "dense"):
        raise ValueError(f"Invalid {mode=}: must be 'compact' or 'dense'")
    converted = any(isinstance(module, CompactLayer) for module in model.modules())
    if mode == "dense" and (converted or rank is None):
        raise ValueError(f"mode='dense' takes a rank and a plain model, got {rank=} and {converted=}")
    if rank is None and not converted:
        raise ValueError("rank=None takes a model that grass.compact() converted: give a rank to convert this one")
    wrapped = isinstance(model, (DistributedDataParallel, FullyShardedDataParallel))
    if mode == "compact" and not converted and (wrapped or any(isinstance(p, DTensor) for p in model.parameters())):
        raise RuntimeError(
            f"Too late to convert: {type(model).__name__} is wrapped or sharded; call grass.compact() first"
        )


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [item for item in model.named_parameters() if item[1].requires_grad]


def _split_by_decay(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group in two: what Trainer lets decay, and the rest."""
    names = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # uses no self
    split = []
    for group in groups:
        decaying = [item for item in group["params"] if item[0] in names]
        others = [item for item in group["params"] if item[0] not in names]
        split += [{**group, "params": decaying}, {**group, "params": others, "weight_decay": 0.0}]
    return [group for group in split if group["params"]]


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
    """Trainer zeroes the model's gradients, not the optimizer's; a run that ``auto_find_batch_size`` aborted may have
    left sketches too.
    """
    for module in model.modules():
        if isinstance(module, CompactLayer):
            module.clear_sketch()


def _saved_with(state: TrainerState) -> dict[str, Any]:
    """What Trainer saves for callbacks as part of its state, by name; it is annotated as a list."""
    saved: Any = state.stateful_callbacks
    return cast(dict[str, Any], saved)


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
