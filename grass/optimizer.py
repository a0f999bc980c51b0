r"""``GrassAdamW``: a drop-in for ``torch.optim.AdamW`` that trains ``r`` rows of each weight at a time.

A third of this file is the signature and the docstring with all options, which is why it has more than 300 lines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from grass.compact_mode.conversion import trainable_parameters
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.reads import Reads
from grass.compact_mode.refresh_cycle import NEW, arm, take_over
from grass.compact_mode.registry import Owner, by_active_rows, layers_of, note_seeds, take_flags
from grass.coverage import report_decay, report_rank, report_scale
from grass.health import Health
from grass.interrupted import mend
from grass.lost_updates import LostUpdates
from grass.offload.host_optimizer import HostOptimizer
from grass.offload.options import Offload
from grass.options import Options, as_plain, is_projected
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.parallel.shards import TENSOR_PARALLEL, is_tensor_parallel
from grass.selection.exploration import auto_scale
from grass.state_dict import Loading, completed
from grass.step_checks import StepChecks, check_gradients
from grass.stepping.optimizer_step import OptimizerStep
from grass.validation import check_offloaded, report_default_rank, tensors_of, validate_group


class StepsInBackward(Protocol):
    """The handle that :func:`grass.step_in_backward` sets on the optimizer.

    Attributes:
        rebuild: sets one like it on a copy of the optimizer.
    """

    rebuild: Callable[[GrassAdamW], Any]

    def finish(self, optimizer: GrassAdamW, closure: Callable[[], float] | None) -> None:
        """Step the parameters that still have a gradient."""


class NamedByModel(list[tuple[str, nn.Parameter]]):
    """Named parameters whose names Grass has looked up: groups without names may follow.

    Attributes:
        model: the model; its frozen parameters are in no group. Copies do not know it.
    """

    model: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple[type[NamedByModel], tuple[list[tuple[str, nn.Parameter]]]]:
        return NamedByModel, (list(self),)


_P = ParamSpec("_P")
_T = TypeVar("_T")
ParamsT = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class GrassAdamW(Optimizer):
    r"""AdamW on structured sparse gradients (Muhamed et al., 2024, arXiv 2406.17660, Algorithm 1).

    The step keeps ``r`` rows ``sigma`` (``dim=1``: columns) of each projected weight's gradient ``G (m, n)``. Adam's
    moments exist only for these rows: ``2rn`` values instead of ``2mn``. Every ``update_interval`` steps it chooses
    rows again, by the norms of that step's gradient.

    A model that :func:`grass.compact` converted trains its active rows in the same way. It chooses rows by a sketch of
    the gradient, gathered in every ``update_interval``-th step, for the next step on. ``rank`` and ``dim`` are those of
    the conversion.

    Rows that are not selected move too, without state (``explore``, :mod:`grass.selection.exploration`). The defaults
    trained best in ``docs/quality.md``; ``**grass.PAPER`` gives the paper's.

    Groups with ``rank=None`` and tensors of fewer than two dimensions are plain AdamW, computed by torch. Of these,
    vectors in bfloat16 or float16, and other tensors of at most 65,536 elements, have a float32 master in the state,
    without which small steps would be lost (:mod:`grass.state.master`). Weights of more than two dimensions are treated
    as ``(shape[0], -1)`` matrices. Every argument but ``offload`` is also a group
    key.

    Args:
        params: tensors, named tensors or groups, as for any ``torch.optim`` optimizer, or a converted model.
            :func:`grass.param_groups` makes groups that leave embeddings and heads at full rank. A ``rank`` for bare
            tensors holds for all matrices among them, which a log message says.
        lr: learning rate; a float or a one-element tensor.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled decay rate.
        rank: rows to train per weight, an integer or a fraction in (0, 1] of the selected dimension; ``None`` is AdamW.
        update_interval: steps from one selection to the next (``K``).
        selection: one of :func:`grass.available_rules`.
        replacement: draw rows with replacement, scaled so that the projection is unbiased.
        dim: select rows (0), columns (1) or along the smaller dimension (``"auto"``; 0 for square weights).
        scale: multiplies the update of projected weights (``alpha``). ``"auto"`` is ``n / (r + q)`` where ``q`` of
            ``n`` rows are explored beside ``r`` selected ones, and 1 without explored rows. So AdamW's learning rate
            can stay (:func:`grass.selection.exploration.auto_scale`). Dense mode, which moves all rows, has 1.
        state_policy: what becomes of the moments at a refresh: ``"reset"``, ``"keep"`` or ``"bank"``
            (:mod:`grass.state.policies`).
        warmup_after_refresh: steps of a linear learning-rate ramp after each refresh, except the first selection.
        seed: seed of the sampling rules. Selection depends only on it, the parameter's place in the groups and the
            number of refreshes so far, never on the global generators.
        maximize: ascend.
        decay: ``"selected"`` decays the rows that move: selected ones by ``lr weight_decay``, explored ones by
            ``(n - r) / q`` times as much, so that over many steps every row decays as under AdamW. ``"all"`` decays
            whole weights in each step.
        explore: number of other rows that move in each step, without state: a count, or a fraction of the selected
            dimension, cut to the rows there are (:mod:`grass.selection.exploration`). ``1.0`` moves all of them, 0
            none. ``None`` is ``1.0`` in dense mode, 0 with ``replacement=True``, and the number that the layers were
            converted with in compact mode.
        experts: weights ``(E, m, n)`` are matrices of ``E`` experts. Rows are chosen of each by its own gradient, and
            an expert without tokens stays as it is (:mod:`grass.stepping.experts`). ``False``: they are ``(E, m n)``.
            :func:`grass.param_groups` sets it.
        bank_dtype: precision of the bank: ``"float32"`` or ``"bfloat16"``.
        shard_bank: divide the bank among the ranks of data-parallel training instead of keeping a copy on each. Ranks
            then exchange the rows that enter a selection, and each must save its part of the state (see
            :meth:`state_dict`). The bank of sharded weights is always sharded as they are.
        moment_dtype: precision of the moments of projected weights: ``"float32"``, or rounded stochastically
            ``"bfloat16"`` or ``"8bit"`` (:mod:`grass.state.precision`). Moments of float64 weights stay float64.
        stochastic_rounding: round bfloat16 and float16 weights up or down at random when they are written, so that
            updates smaller than their spacing survive on average; also large tensors at full rank, whose moments have
            the weight's precision. Not for ``replacement=True``.
        refresh: how compact mode learns the norms for a selection: ``"sketch"``, from a Johnson-Lindenstrauss sketch of
            the gradient, or ``"exact"``, from the full gradient of that one step.
        sketch_size: columns of the sketch.
        amsgrad: ``False``.
        fused: step float32 weights on the CPU by a kernel that reads and writes every chosen row once. It is compiled
            on first use. Without a C++ compiler ``None`` uses torch's operators and logs it once, and ``True`` raises
            ``RuntimeError``. ``False`` never uses the kernel. At full rank, ``False`` switches torch's fused
            implementation off; the others use it if gradient and moments have the strides of the weight.
        foreach: ``True`` steps parameters at full rank by torch's foreach implementation.
        capturable: ``False``.
        differentiable: ``False``.
        offload: ``"cpu"`` or a :class:`grass.Offload` keeps moments, bank and a copy of the weights in host memory and
            steps there, during the next forward (:mod:`grass.offload`).

    Attributes:
        process_group: the ranks that train this model together; ``None``, which pickles restore, means all there are.
        given_norms: row norms by parameter that replace the gradient's in the next refresh (dense mode).
        in_backward: the handle of :func:`grass.step_in_backward`, if parameters are stepped in backward.
        offload: steps on the host, if it was asked for; ``offload.finish()`` waits until all weights are up to date.

    Errors:
        When a group is added, ``ValueError`` for values out of range, including a rank that exceeds the selected
        dimension or differs from that of converted layers; ``TypeError`` for values of the wrong type and complex
        tensors. In ``step``, ``TypeError`` for sparse gradients, before any weight has changed.

    Example:
        >>> optimizer = GrassAdamW(param_groups(model, rank=128), lr=1e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    writes_back_active_rows = True
    process_group: ProcessGroup | None = None
    in_backward: StepsInBackward | None = None
    offload: HostOptimizer | None = None
    _going_on: OptimizerStep | None = None
    _unfinished = False
    _named_by_model = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        rank: int | float | None = None,
        update_interval: int = 200,
        selection: str = "uniform",
        replacement: bool = False,
        dim: int | str = 1,
        scale: float | str = "auto",
        state_policy: str = "keep",
        warmup_after_refresh: int = 0,
        seed: int = 0,
        maximize: bool = False,
        decay: str = "selected",
        explore: int | float | None = None,
        experts: bool = False,
        bank_dtype: str | torch.dtype = "float32",
        shard_bank: bool = False,
        moment_dtype: str | torch.dtype = "float32",
        stochastic_rounding: bool = False,
        refresh: str = "sketch",
        sketch_size: int = 32,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        offload: Offload | str | None = None,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "offload", "__class__")}
        self._offload_by(Offload.of(offload))
        self._background = Background()
        self.given_norms: dict[Tensor, Tensor] = {}
        self._held: list[CompactLayer] | None = []
        self._health, self._reads, self._lost = Health(), Reads(), LostUpdates()
        self._checks, self._notes_seeds = StepChecks([]), True
        self._named_by_model = isinstance(params, nn.Module)
        super().__init__(trainable_parameters(params) if isinstance(params, nn.Module) else params, as_plain(defaults))
        if isinstance(params, nn.Module):
            self._health.know(params, {id(p) for group in self.param_groups for p in group["params"]})
        report_decay(self.param_groups, self.layers().keys())

    def _offload_by(self, options: Offload | None) -> None:
        """Step on the host if options are given."""
        self.offload = None if options is None else HostOptimizer(options)
        if self.offload is not None:
            self.offload.finish_for(self)

    @staticmethod
    def profile_hook_step(func: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap ``step`` with its hooks, as torch does, and keep ``torch.compile`` from tracing it.

        The kernels inside are compiled already. Tracing the Python around them gave 73 graphs for a two-layer model,
        and more in every step, because step counts change.
        """
        hooked = Optimizer.profile_hook_step(func)
        untraced: Callable[_P, _T] = torch.compiler.disable(hooked, reason="its kernels are compiled")  # type: ignore[no-untyped-call]
        return untraced

    def __getstate__(self) -> dict[str, Any]:
        """The content of copies and pickles."""
        self._background.finish()
        self._mend()
        if self.offload is not None:
            self.offload.settle_states()
        return {
            **super().__getstate__(),
            "_named_by_model": self._named_by_model,
            "_offload_options": None if self.offload is None else self.offload.options,
            "_steps_in_backward": None if self.in_backward is None else self.in_backward.rebuild,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a checkpoint; keys that it lacks take their defaults."""
        self.__dict__.setdefault("_background", Background())
        self.__dict__.setdefault("given_norms", {})
        if "_offload_options" in state:  # a copy
            self._offload_by(state.pop("_offload_options"))
        self._held, self._health, self._reads, self._going_on = None, Health(), Reads(), None
        self._lost = LostUpdates()
        step_in_backward = state.pop("_steps_in_backward", None)
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._checks, self._notes_seeds = StepChecks(self.param_groups), True
        if step_in_backward is not None:
            step_in_backward(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its values and tensors."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        if isinstance(named := param_group.get("params"), NamedByModel):
            self._named_by_model = True
            if named.model is not None and (model := named.model()) is not None:
                self._health.know(model, {id(p) for p in tensors_of(named)})
        group = as_plain(param_group)
        if not isinstance(group["params"], (Tensor, set)):  # torch refuses sets, which have no order
            group["params"] = list(group["params"])
        found = layers_of(tensors_of(group["params"]))
        if any(is_tensor_parallel(layer) and layer.divided_by is None for layer in found):
            raise TypeError(TENSOR_PARALLEL)
        validate_group({**self.defaults, **group}, by_active_rows(found))
        if any(is_projected(p, {**self.defaults, **group}) for p in tensors_of(group["params"])) and not found:
            report_rank({**self.defaults, **group}["rank"])
        if "rank" not in group:
            report_default_rank(self.defaults, group["params"])
        if self.offload is not None:
            check_offloaded({**self.defaults, **group}, found)
        take_flags(found)
        self._append(group)
        added = self.param_groups[-1]
        for layer in found:
            layer.owner = Owner(self)
            take_over(layer, Options.of(added))
            arm(layer, NEW, Options.of(added))
        if added["scale"] == "auto":
            report_scale([auto_scale(layer.shape[layer.dim], *layer.counts()) for layer in found])
        self._held = [*self.held_layers, *(layer for layer in found if layer not in self.held_layers)]
        self._checks.add_last(self.param_groups, self.layers())

    def _append(self, group: dict[str, Any]) -> None:
        """Add a checked group. Torch wants names in all groups or in none; those taken from a model do not count."""
        unnamed = isinstance(group["params"], Tensor) or all(isinstance(p, Tensor) for p in group["params"])
        named = [g for g in self.param_groups if "param_names" in g] if self._named_by_model and unnamed else []
        names = [g.pop("param_names") for g in named]
        try:
            super().add_param_group(group)
        finally:
            for g, given in zip(named, names, strict=True):
                g["param_names"] = given

    def _finish(self) -> None:
        """Wait for all work on state and weights that goes on beside the training loop."""
        self._background.finish()
        if self.offload is not None:
            self.offload.finish()

    @property
    def held_layers(self) -> list[CompactLayer]:
        """The converted layers whose active rows this optimizer trains."""
        if self._held is None:  # a copy
            self._held = layers_of(p for group in self.param_groups for p in group["params"])
        return self._held

    def layers(self) -> dict[int, CompactLayer]:
        """These layers by the current ``id`` of their active rows: wrappers may replace parameters."""
        return by_active_rows(self.held_layers)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimization step; ``closure`` re-evaluates the model and returns the loss."""
        if self.in_backward is not None:
            self.in_backward.finish(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self.param_groups)
        whole, self._going_on = self.begin_step(), None
        self._reads.check()
        self._mend()
        for layer in whole.layers.values():
            Owner.check(layer, self)
            layer.prepare_step()
        if self.offload is None or not self.offload.options.masters:
            self._lost.count(self.param_groups, whole.layers)
        self._unfinished = self.offload is None
        self._advance(whole)
        self._unfinished = False
        whole.ranks.verify_selection(whole.chosen)
        self._health.check(self.param_groups, self.state, whole.layers, whole.stepped)
        self._reads.watch(whole.layers.values(), whole.stepped)
        return loss

    def _mend(self) -> None:
        """Make state and weights agree if the last step was interrupted."""
        if self._unfinished:
            mend(self.param_groups, self.state, self.layers())
            self._unfinished = False

    def _advance(self, whole: OptimizerStep) -> None:
        """Step all parameters that have a gradient, here or on the host."""
        if self.offload is not None:
            self.offload.step(self.param_groups, whole)
            return
        index = 0
        for group in self.param_groups:
            whole.advance(group, enumerate(group["params"], index))
            index += len(group["params"])

    def begin_step(self) -> OptimizerStep:
        """The step that has begun in backward; otherwise a new one, after all checks that need no gradient."""
        if self._going_on is not None:
            return self._going_on
        self._finish()
        layers, ranks = self.layers(), Ranks.of(self.process_group)
        self._checks.before_step(self.param_groups, self.state, layers, ranks, self._settings())
        if self._notes_seeds:
            note_seeds(self.param_groups, layers, self.state)
            self._notes_seeds = False
        return OptimizerStep(self.state, layers, ranks, self._background, self.given_norms)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and sketches of active rows that an abandoned step has left."""
        if not set_to_none and self.offload is not None:
            self.offload.finish()  # it reads gradients
        self._mend()
        super().zero_grad(set_to_none)
        for layer in self.layers().values():
            layer.clear_sketch()

    def verify_settings(self) -> None:
        """Compare with the other ranks what decides a step; every ``step`` does so too.

        Raises:
            ValueError: on every rank, naming a setting that differs and the ranks that have each value.
        """
        layers, ranks = self.layers(), Ranks.of(self.process_group)
        self._checks.check_ranks(self.param_groups, self.state, layers, ranks, self._settings())

    def _settings(self) -> dict[str, Any]:
        """What ranks must agree on beside the groups' settings: groups of ranks are made for host tensors."""
        options = None if self.offload is None else self.offload.options
        return {"offload": None if options is None else "cpu", "masters": options is not None and options.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit (:mod:`grass.state_dict`).

        As with torch's optimizers, the saved hyperparameters replace those that this one was built with. A log message
        names those that decide rows and state, such as ``rank``.

        Raises:
            ValueError: active rows were saved with another rank or dim than their layer has, or the state is that of
                another optimizer or mode.
        """
        self._background.finish()
        if self.offload is not None:
            self.offload.settle()
        self._add_groups_put_there()
        masters = self.offload is not None and self.offload.options.masters
        with Loading(self.layers(), Ranks.of(self.process_group), all_masters=masters).through(self):
            super().load_state_dict(state_dict)
        self._unfinished = False
        if self.offload is not None:
            self.offload.rebuild(self.state)

    def _add_groups_put_there(self) -> None:
        """Add groups that were put into the list by hand, as by Lightning's ``BaseFinetuning`` before it loads."""
        put_there = self.param_groups[self._checks.groups :]
        del self.param_groups[self._checks.groups :]
        for group in put_there:
            self.add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain scalars; with the active rows' values if the weights cannot hold them.

        Sharded state is ``DTensor``: save it by ``torch.distributed.checkpoint``, on every rank.
        """
        self._background.finish()
        if self.offload is not None:
            self.offload.settle_states()
        return completed(super().state_dict(), self, self.layers(), Ranks.of(self.process_group))
