r"""``GrassAdamW``: a drop-in for ``torch.optim.AdamW`` that trains ``r`` rows of each weight at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from grass.compact_mode.cycle import arm, by_active_rows, layers_of, resume
from grass.compact_mode.layer import CompactLayer
from grass.health import Health, Owner
from grass.options import SHARED_KEYS, as_plain, is_projected, settings_of, validate
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks, checksum
from grass.parallel.shards import local
from grass.state.bank import Share
from grass.state.bank_exchange import shares_bank
from grass.state.schema import HOST_KEYS, State
from grass.state.sharding import assembled, assembled_bank
from grass.stepping import step_device
from grass.stepping.whole import WholeStep
from grass.validation import check_changed, tensors_of, validate_group

logger = logging.getLogger("grass")


class StepsInBackward(Protocol):
    """What :func:`grass.step_in_backward` leaves with the optimizer."""

    def finish(self, optimizer: GrassAdamW, closure: Callable[[], float] | None) -> None:
        """Step what still has a gradient."""


_P = ParamSpec("_P")
_T = TypeVar("_T")
ParamsT = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class GrassAdamW(Optimizer):
    r"""AdamW on structured sparse gradients (Muhamed et al., 2024, arXiv 2406.17660, Algorithm 1).

    Of the gradient ``G (m, n)`` of each projected weight, ``r`` rows ``sigma`` (``dim=1``: columns) are kept, and
    Adam's moments exist for those alone: ``2rn`` values instead of ``2mn``. Every ``update_interval`` steps the rows
    are chosen again from the norms of the gradient at hand, which is the first to be used with them.

    Given a model that :func:`grass.compact` converted, or its parameters, it trains the active rows in the same way,
    writes them back, and lets the sketch gathered in every ``update_interval``-th step choose the rows from the next
    step on; ``rank`` and ``dim`` are then the layers' own.

    Rows that are not selected move too, without state (``explore``, :mod:`grass.selection.exploration`). Defaults are
    what trained best in ``docs/quality.md``; ``**grass.PAPER`` gives the paper's.

    Groups with ``rank=None`` and tensors of fewer than two dimensions are plain AdamW, computed by torch. Weights of
    more than two dimensions are treated as ``(shape[0], -1)`` matrices. Every argument is also a group key.

    Args:
        params: tensors, named tensors or groups, as for any ``torch.optim`` optimizer; :func:`grass.param_groups` makes
            groups that leave embeddings and heads at full rank. Or a converted model.
        lr: learning rate; a float or a one-element tensor.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled decay rate.
        rank: rows to train per weight, an integer or a fraction in (0, 1] of the selected dimension; ``None`` is AdamW.
        update_interval: steps from one selection to the next (``K``).
        selection: one of :func:`grass.available_rules`.
        replacement: draw rows with replacement, scaled so that the projection is unbiased.
        dim: select rows (0), columns (1) or along the smaller dimension (``"auto"``; 0 for square weights).
        scale: multiplies the update of projected weights (``alpha``).
        state_policy: what becomes of the moments at a refresh: ``"reset"``, ``"keep"`` or ``"bank"``
            (:mod:`grass.state.moments`).
        warmup_after_refresh: after each refresh but the first selection, ramp the learning rate linearly over this
            many steps.
        seed: of the sampling rules. Selection depends on it, on the parameter's place in the groups and on the number
            of refreshes so far, never on the global generators.
        maximize: ascend.
        decay: ``"selected"`` decays the rows that move, ``"all"`` whole weights.
        explore: how many of the rows that are not selected move in each step, without state: a count or a fraction of
            the selected dimension, cut to the rows there are (:mod:`grass.selection.exploration`). ``1.0`` moves all of
            them, 0 none. ``None`` is ``1.0`` in dense mode, 0 with ``replacement=True``, and in compact mode the number
            that the layers were converted with.
        bank_dtype: precision of the bank: ``"float32"`` or ``"bfloat16"``.
        shard_bank: divide the bank among the ranks of data-parallel training, which bring each other the rows that
            enter a selection, instead of one copy on each; then every rank has to save its part of the state (see
            :meth:`state_dict`). The bank of sharded weights is sharded as they are, whatever this says.
        moment_dtype: precision of the moments of projected weights: ``"float32"``, ``"bfloat16"`` or ``"8bit"``, both
            rounded stochastically (:mod:`grass.state.precision`). Moments of float64 weights stay float64.
        stochastic_rounding: round what is written to bfloat16 and float16 weights, at full rank too (whose moments have
            their precision), up or down by chance, so that updates below their spacing are kept in the mean. Not for
            ``replacement=True``.
        refresh: how compact mode learns the norms for a selection: ``"sketch"``, from a Johnson-Lindenstrauss sketch of
            the gradient, or ``"exact"``, from the full gradient of that one step.
        sketch_size: columns of the sketch.
        amsgrad: ``False``.
        fused: step float32 weights on the CPU by a kernel that reads and writes every chosen row once. It is compiled
            on first use: where there is no C++ compiler, ``None`` falls back to torch's operators and says so once,
            ``True`` raises ``RuntimeError``. ``False`` never uses it. At full rank, ``False`` switches torch's fused
            implementation off; the others use it where gradient and moments have the strides of the weight.
        foreach: ``True`` steps parameters at full rank by torch's foreach implementation.
        capturable: ``False``.
        differentiable: ``False``.

    Attributes:
        process_group: the ranks that train this model together; ``None``, which pickles restore, means all there are.
        given_norms: in dense mode, of what a coming refresh chooses rows by where not by the gradient at hand.
        in_backward: the handle of :func:`grass.step_in_backward`, if parameters are stepped in backward.

    Errors:
        ``ValueError`` for values out of range, including a rank beyond the selected dimension or another than converted
        layers have, when the group is added; ``TypeError`` for values of the wrong type and complex tensors then, and
        for sparse gradients in ``step`` before any weight has changed.

    Example:
        >>> optimizer = GrassAdamW(param_groups(model, rank=128), lr=1e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    writes_back_active_rows = True
    process_group: ProcessGroup | None = None
    in_backward: StepsInBackward | None = None
    _going_on: WholeStep | None = None
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
        scale: float = 1.0,
        state_policy: str = "keep",
        warmup_after_refresh: int = 0,
        seed: int = 0,
        maximize: bool = False,
        decay: str = "selected",
        explore: int | float | None = None,
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
    ) -> None:
        defaults = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        self._background = Background()
        self.given_norms: dict[Tensor, Tensor] = {}
        self._verified = False
        self._held: list[CompactLayer] | None = []
        self._health = Health()
        self._selecting: dict[int, bool] | None = None
        self._settings: list[dict[str, Any]] = []
        self._named_by_model = isinstance(params, nn.Module)
        super().__init__(_trainable(params) if isinstance(params, nn.Module) else params, as_plain(defaults))

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
        """What copies and pickles hold."""
        self._background.finish()
        return {**super().__getstate__(), "_named_by_model": self._named_by_model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a checkpoint; keys that it lacks take their defaults."""
        self.__dict__.setdefault("_background", Background())
        self.__dict__.setdefault("given_norms", {})
        self._verified, self._selecting, self._held, self._health = False, None, None, Health()
        self._going_on = None
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._settings = [settings_of(group) for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its values against its tensors."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        group = as_plain(param_group)
        if not isinstance(group["params"], (Tensor, set)):  # torch refuses sets, which have no order
            group["params"] = list(group["params"])
        found = layers_of(tensors_of(group["params"]))
        validate_group({**self.defaults, **group}, by_active_rows(found))
        self._append(group)
        added = self.param_groups[-1]
        for layer in found:
            layer.owner = Owner(self)
            arm(layer, NEW, added)
        self._held = [*self.held_layers, *(layer for layer in found if layer not in self.held_layers)]
        self._selecting = self._select(self.layers())
        self._settings.append(settings_of(added))

    def _append(self, group: dict[str, Any]) -> None:
        """Add a checked group. Torch wants names in all groups or in none; the names of a model's do not count."""
        unnamed = isinstance(group["params"], Tensor) or all(isinstance(p, Tensor) for p in group["params"])
        named = [g for g in self.param_groups if "param_names" in g] if self._named_by_model and unnamed else []
        names = [g.pop("param_names") for g in named]
        try:
            super().add_param_group(group)
        finally:
            for g, given in zip(named, names, strict=True):
                g["param_names"] = given

    @property
    def held_layers(self) -> list[CompactLayer]:
        """The converted layers whose active rows this optimizer trains."""
        if self._held is None:  # a copy
            self._held = layers_of(p for group in self.param_groups for p in group["params"])
        return self._held

    def layers(self) -> dict[int, CompactLayer]:
        """These layers by the ``id`` of their active rows, as of now: wrappers may replace parameters."""
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
        self._check_gradients()
        whole, self._going_on = self.begin_step(), None
        for layer in whole.layers.values():
            Owner.check(layer, self)
            layer.sync()
        index = 0
        for group in self.param_groups:
            whole.advance(group, enumerate(group["params"], index))
            index += len(group["params"])
        whole.ranks.verify_selection(whole.chosen)
        self._health.check(self.param_groups, self.state, whole.layers, whole.stepped)
        return loss

    def begin_step(self) -> WholeStep:
        """The step that has begun in backward; otherwise a new one, after all checks that need no gradient."""
        if self._going_on is not None:
            return self._going_on
        self._background.finish()
        layers = self.layers()
        self._check_settings(layers)
        self._check_parameters(layers)
        self.verify_settings()
        return WholeStep(self.state, layers, Ranks.of(self.process_group), self._background, self.given_norms)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them the sketches of active rows, which a step that was given up leaves behind."""
        super().zero_grad(set_to_none)
        for layer in self.layers().values():
            layer.clear_sketch()

    def verify_settings(self) -> None:
        """Compare with the other ranks what decides the selection, once; ``step`` does before the first one.

        Raises:
            ValueError: on every rank, naming a setting that differs and the ranks that have each value.
        """
        ranks = Ranks.of(self.process_group)
        if self._verified or ranks.group is None:
            return
        layers = self.layers()
        settings: dict[str, Any] = {}
        for number, group in enumerate(self.param_groups):
            settings |= {f"{key} of group {number}": group[key] for key in SHARED_KEYS}
            for i, p in enumerate(group["params"]):
                name = group.get("param_names", {i: f"parameter {i} of group {number}"})[i]
                settings[f"the shape of {name}"] = tuple(p.shape)
                settings[f"the age of {name}"] = [
                    int(self.state.get(p, {}).get(key, 0)) for key in ("step", "refreshes")
                ]
                if id(p) in layers:
                    settings[f"the rows of {name}"] = checksum(layers[id(p)].chosen)
        ranks.verify_settings(settings)
        self._verified = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit.

        ``Optimizer.load_state_dict`` casts state to the dtype and device of its parameter, which would round row
        indices and moments of bfloat16 weights and bring the bank to the device. So the state of projected weights
        bypasses it.

        Raises:
            ValueError: active rows were saved with another rank or dim than their layer has, or the state is that of
                another optimizer or mode.
        """
        exact: dict[int, State] = {}
        self._verified = False
        before = self.register_load_state_dict_pre_hook(lambda _, loading: self._begin_load(loading, exact))
        after = self.register_load_state_dict_post_hook(lambda _: self._finish_load(exact), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain scalars; with the active rows' values where the weights cannot hold them.

        What is divided among ranks is ``DTensor``: save it by ``torch.distributed.checkpoint``, on every rank.
        """
        self._background.finish()
        state_dict, layers, ranks = super().state_dict(), self.layers(), Ranks.of(self.process_group)
        for position, (p, group) in enumerate(self._grouped()):
            state = state_dict["state"].get(position, {})
            if "indices" in state and hasattr(p, "to_local"):
                state = state_dict["state"][position] = assembled(state, p, matrix_shape(p, layers))
            elif "bank_steps" in state and ranks.group is not None and shares_bank(group):
                state = state_dict["state"][position] = assembled_bank(state, matrix_shape(p, layers), ranks.group)
            if "active" in state:
                values = layers[id(p)].selected_part(p.detach())
                state_dict["state"][position] = {**state, "active": values.clone()}
        return state_dict

    def _grouped(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Every parameter with its group."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _begin_load(self, loading: dict[str, Any], exact: dict[int, State]) -> dict[str, Any]:
        keys = [key for group in loading["param_groups"] for key in group["params"]]
        bare, layers = _take_projected(loading, keys, exact), self.layers()
        for position, ((p, group), key) in enumerate(zip(self._grouped(), keys, strict=False)):
            layer, state = layers.get(id(p)), exact.get(position)
            selects = layer is not None or is_projected(p, group)
            if loading["state"].get(key) and selects != (state is not None):
                raise ValueError(
                    f"State of parameter {key} of shape {tuple(p.shape)} is that of plain AdamW or of other rows: "
                    "optimizer state does not carry over between AdamW, dense and compact mode; load the model alone"
                )
            if layer and state and (len(state["indices"]), state["dim"]) != (layer.rank, layer.dim):
                raise ValueError(
                    f"State of active rows with rank={len(state['indices'])}, dim={state['dim']} for a layer "
                    f"with rank={layer.rank}, dim={layer.dim}"
                )
        groups = [dict(group) for group in loading["param_groups"]]
        for ours, theirs in zip(self.param_groups, groups, strict=False):
            theirs["shard_bank"] = ours["shard_bank"]  # of these processes, not of those that saved
            validate({**self.defaults, **theirs})
        return {**bare, "param_groups": groups}

    def _finish_load(self, exact: dict[int, State]) -> None:
        layers = self.layers()
        for position, (p, group) in enumerate(self._grouped()):
            if position in exact:
                self.state[p] = self._held_here(exact[position], p, group, layers)
            elif "step" in self.state[p]:  # a number where an old torch saved it
                step = torch.as_tensor(self.state[p]["step"], dtype=torch.float32, device=step_device(p, group))
                self.state[p]["step"] = step
        for position, (p, group) in enumerate(self._grouped()):
            if id(p) in layers and (state := self.state[p]):
                resume(layers[id(p)], state, state.get("active"), group, position)

    def _held_here(self, saved: State, p: Tensor, group: dict[str, Any], layers: dict[int, CompactLayer]) -> State:
        """A copy of what was saved for a projected weight, as far as this process holds it."""
        state: State = {key: local(value) if isinstance(value, Tensor) else value for key, value in saved.items()}
        state["step"] = int(state["step"])
        if "bank_steps" in state and not hasattr(p, "to_local"):
            ranks = Ranks.of(self.process_group) if shares_bank(group) else Ranks(None)
            share = Share.of(matrix_shape(p, layers)[state["dim"]], ranks)
            for key in HOST_KEYS:
                state[key] = share.of_bank(state[key], 0 if key == "bank_steps" else state["dim"])
        return {
            key: value.to("cpu" if key in HOST_KEYS else p.device, copy=True) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def _select(self, layers: dict[int, CompactLayer]) -> dict[int, bool]:
        """The ``id`` of every parameter that rows are selected of, and whether it is active rows itself."""
        return {id(p): id(p) in layers for p, group in self._grouped() if id(p) in layers or is_projected(p, group)}

    def _check_settings(self, layers: dict[int, CompactLayer]) -> None:
        """Check groups whose settings were changed by hand since the last step."""
        for number, (group, before) in enumerate(zip(self.param_groups, self._settings, strict=False)):
            if (settings := settings_of(group)) != before:
                check_changed(group, before, any(self.state.get(p) for p in group["params"]))
                validate_group(group, layers)
                self._settings[number], self._selecting = settings, None

    def _check_parameters(self, layers: dict[int, CompactLayer]) -> None:
        """Refuse to train whole what was to be trained by rows."""
        found = self._select(layers)
        if self._selecting is None:
            self._selecting = found
        if len(found) < len(self._selecting):
            if any(self._selecting.get(id(p)) and id(p) not in layers for p, _ in self._grouped()):
                raise RuntimeError(
                    "grass.expand(), or a move from the meta device, has replaced the active rows that this optimizer "
                    "was built for: build a new one for the parameters as they are now"
                )
            raise RuntimeError(
                f"Of {len(self._selecting)} parameters that rows are selected of, {len(found)} are left: a wrapper has "
                "replaced them by flattened ones (DeepSpeed ZeRO, FSDP1), or FSDP2 has not resharded them before the "
                "step; train with DDP or FSDP2 (fully_shard)"
            )

    def _check_gradients(self) -> None:
        for p, group in self._grouped():
            check_gradient(p, group)


def check_gradient(p: Tensor, group: dict[str, Any]) -> None:
    """Refuse a gradient that cannot be stepped.

    Raises:
        TypeError: it is sparse.
        ValueError: the parameter is sharded and its moments are to have 8 bits.
    """
    if group["moment_dtype"] == "8bit" and hasattr(p, "to_local"):
        raise ValueError("moment_dtype='8bit' cannot be sharded: its blocks of 256 values run over rows")
    if p.grad is not None and p.grad.layout != torch.strided:
        raise TypeError(
            f"GrassAdamW takes dense gradients, got {p.grad.layout} for a weight of {tuple(p.shape)}; "
            "use sparse=False in the embedding or torch.optim.SparseAdam for it"
        )


def _take_projected(state_dict: dict[str, Any], keys: list[int], taken: dict[int, State]) -> dict[str, Any]:
    """Move the state of projected weights from a state dict, shallowly copied, to ``taken``, keyed by position."""
    states = state_dict["state"]
    taken.update((i, states[key]) for i, key in enumerate(keys) if "indices" in states.get(key, ()))
    bare = {key: {} if "indices" in state else state for key, state in states.items()}
    return {**state_dict, "state": bare}


NEW: State = {"step": 0, "refresh_step": 0, "refreshes": 1}
"""The counters of active rows that have not been stepped."""


def matrix_shape(p: Tensor, layers: dict[int, CompactLayer]) -> tuple[int, ...]:
    """``(m, n)`` of the weight that a parameter is or, as active rows, is part of."""
    return tuple(layers[id(p)].shape) if id(p) in layers else (p.shape[0], p.numel() // p.shape[0])


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The named parameters of a converted model that train."""
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    frozen = [layer.label for layer in layers if not layer.active.requires_grad]
    if layers and len(frozen) == len(layers):
        raise ValueError(
            f"The active rows of all {len(layers)} converted layers are frozen (requires_grad=False), as PEFT freezes "
            "a base model: convert a model or wrap it by PEFT, not both"
        )
    if frozen:
        logger.warning("Grass: active rows frozen (requires_grad=False), not trained: %s", ", ".join(frozen))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no active rows: convert it first, grass.compact(model, rank=...), or pass "
            "grass.param_groups(model, rank=...) or model.parameters() to train it from full gradients"
        )
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
