"""A factory that converts a model and builds its optimizer when Trainer asks for one."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import check_target_module_exists

from grass.compact_mode.conversion import compact
from grass.compact_mode.layer import CompactLayer
from grass.groups import param_groups
from grass.muon import GrassMuon
from grass.optimizer import GrassAdamW
from grass.targets import Targets, is_linear

CONVERSION = ("explore", "dim", "dtype", "calibration")
"""Keywords that the factory passes to :func:`grass.compact` in compact mode; the others go to the optimizer."""

OPTIMIZERS: dict[str, type[GrassAdamW] | type[GrassMuon]] = {"adamw": GrassAdamW, "muon": GrassMuon}
"""What the keyword ``optimizer`` chooses."""

BY_PATCH = "grass_adamw"
"""The name of the optimizer where ``docs/transformers-5.23.patch`` is applied; ``optim_args`` then has the rank."""


class GrassFactory:
    """Builds an optimizer of Grass for ``Trainer(optimizer_cls_and_kwargs=(GrassFactory, {...}))``."""

    def __call__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        mode: str = "compact",
        optimizer: str = "adamw",
        rank: int | float | None = None,
        targets: Targets = None,
        exclude: Targets = (),
        decay_names: Callable[[nn.Module], Iterable[str]] | None = None,
        **keywords: Any,
    ) -> GrassAdamW | GrassMuon:
        """Convert ``model`` in compact mode and build its optimizer. Norms and biases do not decay.

        Args:
            model: any module that is not wrapped yet.
            args: the source of learning rate, weight decay, Adam's betas and epsilon, seed, ``optim_target_modules``
                and ``optim_args``, unless a keyword overrides them. ``optim_args`` may hold arguments of
                :class:`grass.GrassAdamW`, as in ``"offload=cpu,update_interval=100"``. As in Trainer, a
                target in a list may be any part of a module's name; unlike there, ``"all-linear"`` leaves output heads
                out.
            mode: ``"compact"``, the default, which converts the model and needs the least memory; or ``"dense"``, which
                leaves the model as it is and forms full gradients.
            optimizer: ``"adamw"``, which is :class:`grass.GrassAdamW`; or in compact mode ``"muon"``, which is
                :class:`grass.GrassMuon`.
            rank: rows to train per weight, a number or a fraction; ``None`` for a model that is converted already.
            targets: as in :func:`grass.matched_modules`.
            exclude: layers to leave out, given like ``targets``.
            decay_names: a function that names the parameters of a model that decay; active rows decay as the weight
                whose they are. ``None``: all but norms and biases, as Trainer has it.
                :class:`grass.integrations.transformers.GrassTrainer` gives its ``get_decay_parameter_names``.
            keywords: any other argument of the optimizer and, in compact mode, ``explore``, ``dim``,
                ``dtype`` and ``calibration`` of :func:`grass.compact`. To use ``weights="int8"``, convert the model
                before Trainer is made.

        Raises:
            TypeError: a keyword is not one of these.
            ValueError: a value is out of range, nothing matches, ``mode`` and ``rank`` do not fit the model,
                ``args.optim`` is another optimizer than AdamW, or TRL's ``sync_ref_model`` is to follow a model in
                compact mode.
            RuntimeError: DDP or FSDP has wrapped the model, which cannot be converted any more.
        """
        check_keywords({"optimizer": optimizer, **keywords})
        if keywords.pop("weights", None) is not None:
            raise ValueError(
                "Trainer loads a checkpoint before it calls this factory, into a model without a place for int8 codes: "
                "call grass.compact(model, ...) before Trainer is made, and leave rank and weights out here"
            )
        keywords = {**_from_arguments(args, OPTIMIZERS[optimizer]), **keywords}
        rank = keywords.pop("rank", None) if rank is None else rank
        targets = _targets(model, args) if targets is None else targets
        _check_mode(model, mode, rank)
        if mode == "dense" and optimizer != "adamw":
            raise ValueError(f"Invalid {optimizer=} with mode='dense': must be 'adamw', or mode 'compact'")
        if mode == "compact" and getattr(args, "sync_ref_model", False):
            raise ValueError(
                "sync_ref_model=True mixes the parameters of two models in order, and a converted model has others: "
                "use mode='dense', or no reference model that follows"
            )
        if rank is None:
            groups: list[dict[str, Any]] = [{"params": _trainable(model)}]
        elif mode == "dense":
            groups = param_groups(model, rank, targets=targets, exclude=exclude)
        else:
            conversion = {key: keywords.pop(key) for key in CONVERSION if key in keywords}
            compact(model, rank=rank, targets=targets, exclude=exclude, seed=keywords.get("seed", 0), **conversion)
            groups = [{"params": _trainable(model)}]
        return OPTIMIZERS[optimizer](_split_by_decay(groups, _decaying(model, decay_names)), **keywords)


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse keywords that :class:`GrassFactory` and the optimizer that they choose do not have.

    Raises:
        TypeError: with the keyword, a similar one, and the list of all.
        ValueError: there is no such optimizer.
    """
    if (name := given.get("optimizer", "adamw")) not in OPTIMIZERS:
        raise ValueError(f"Invalid optimizer={name!r}: must be one of {', '.join(map(repr, OPTIMIZERS))}")
    own, optimizer = signature(GrassFactory.__call__).parameters, signature(OPTIMIZERS[name]).parameters
    allowed = {*own, *optimizer, *CONVERSION, "weights"} - {"self", "args", "model", "params", "keywords"}
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            raise TypeError(
                f"Grass has no option {name!r}{f', did you mean {close[0]!r}?' if close else ''}: must be one of "
                f"{', '.join(sorted(allowed))}"
            )


def check_optim(args: TrainingArguments) -> None:
    """Refuse arguments that choose another optimizer than AdamW.

    Raises:
        ValueError: ``optim`` is none of Trainer's names for torch's AdamW, of which one is its default, and not
            ``"grass_adamw"``, which a patch adds (``docs/integrations.md``).
    """
    name = _name(args)
    if name != BY_PATCH and (not name.startswith("adamw_torch") or "bit" in name):
        raise ValueError(
            f"Invalid optim={name!r}: Grass brings its own optimizer, leave optim out. To train by another one, call "
            "grass.compact(model, ...), build it and call grass.attach(optimizer, model), and pass optimizers=(...). "
            "Trainer's checkpoints then lack the attachment: save its state_dict() too"
        )


def _name(args: TrainingArguments) -> str:
    """Trainer's name of the optimizer."""
    return str(getattr(args.optim, "value", args.optim))


def _from_arguments(args: TrainingArguments | None, optimizer: type[Optimizer]) -> dict[str, Any]:
    if args is None:
        return {}
    check_optim(args)
    return {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        **_from_optim_args(args.optim_args, optimizer, given=set() if _name(args) == BY_PATCH else {"rank"}),
    }


def _from_optim_args(text: str | None, optimizer: type[Optimizer], given: set[str]) -> dict[str, Any]:
    """``optim_args``, separated by commas outside of brackets; a value that is no Python literal is a string.

    ``given``: arguments that keywords have instead.
    """
    found: dict[str, Any] = {}
    for pair in re.split(r",(?![^(]*\))", text.replace(" ", "")) if text else ():
        name, equals, value = pair.partition("=")
        if equals and name in given:
            raise ValueError(
                f"Invalid optim_args={text!r}: give {name} to GrassFactory, or in GrassTrainer(grass={{...}})"
            )
        if not equals or name not in {*signature(optimizer).parameters} - {"params", *given}:
            raise ValueError(
                f"Invalid optim_args={text!r}: {pair!r} is no argument of {optimizer.__name__} with a value"
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _targets(model: nn.Module, args: TrainingArguments | None) -> Targets:
    """``optim_target_modules``, matched as Trainer does, as a pattern for :func:`grass.matched_modules`."""
    wanted = None if args is None else args.optim_target_modules
    if wanted is None or wanted in ("all-linear", "all_linear"):
        return wanted and "all-linear"
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    names = [name for name in linear if check_target_module_exists(wanted, name)]
    return "|".join(map(re.escape, names)) or wanted  # nothing matches: the error names what was wanted


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


def _decaying(model: nn.Module, decay_names: Callable[[nn.Module], Iterable[str]] | None) -> set[str]:
    """Names of the parameters that decay; active rows do as the weight whose they are, whatever they are called."""
    rule: Any = Trainer.get_decay_parameter_names
    found = set(rule(None, model) if decay_names is None else decay_names(model))  # Trainer's uses no self
    every = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, CompactLayer) and f"{name}.weight" in every:
            found.discard(f"{name}.active")
            if f"{name}.weight" in found:
                found.add(f"{name}.active")
    return found


def _split_by_decay(groups: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """Split each group into the parameters that decay and the rest."""
    split = []
    for group in groups:
        decaying = [item for item in group["params"] if item[0] in names]
        others = [item for item in group["params"] if item[0] not in names]
        split += [{**group, "params": decaying}, {**group, "params": others, "weight_decay": 0.0}]
    return [group for group in split if group["params"]]
