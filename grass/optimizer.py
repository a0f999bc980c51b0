r"""``GrassAdamW``: a drop-in for ``torch.optim.AdamW`` that trains ``r`` rows of each weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from grass.functional import ScratchPool, compiled_project_and_step, decay_all_, project_and_step_
from grass.hyperparameters import as_matrix, is_projected, resolve_dim, validate_group
from grass.moments import HOST_KEYS, State, moment_dtype
from grass.refresh import GroupCoefficients, current_projector, refresh, refresh_due

ParamsT = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class GrassAdamW(Optimizer):
    r"""AdamW on structured sparse gradients (Muhamed et al., 2024, arXiv 2406.17660, Algorithm 1).

    Of the gradient ``G (m, n)`` of each projected weight, ``r`` rows ``sigma`` (``dim=1``: columns) are kept, and
    Adam's moments exist for those alone: ``2rn`` values instead of ``2mn``. Every ``update_interval`` steps the rows
    are chosen again from the norms of the gradient at hand, which is the first to be used with them.

    Groups with ``rank=None`` and tensors of fewer than two dimensions are plain AdamW, computed by torch. Weights of
    more than two dimensions are treated as ``(shape[0], -1)`` matrices. Every argument is also a group key.

    Args:
        params: tensors, named tensors or groups, as for any ``torch.optim`` optimizer; :func:`grass.param_groups` makes
            groups that leave embeddings and heads at full rank.
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
            (:mod:`grass.moments`).
        warmup_after_refresh: after each refresh but the first selection, ramp the learning rate linearly over this
            many steps.
        seed: of the sampling rules. Selection depends on it, on the parameter's place in the groups and on the number
            of refreshes so far, never on the global generators.
        maximize: ascend.
        decay: ``"selected"`` decays the rows that move, ``"all"`` whole weights.
        bank_dtype: precision of the bank: ``"float32"`` or ``"bfloat16"``.
        fused: update projected weights in one compiled pass each (``torch.compile``; on CPU it needs a C++ compiler and
            some seconds per distinct shape on the first step).

    Errors:
        ``ValueError`` for values out of range, including a rank beyond the selected dimension, when the group is added;
        ``TypeError`` for complex tensors then, and for sparse gradients in ``step`` before any weight has changed.

    Example:
        >>> optimizer = GrassAdamW(param_groups(model, rank=128), lr=1e-3)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int | float | None = None,
        update_interval: int = 200,
        selection: str = "top_r",
        replacement: bool = False,
        dim: int | str = "auto",
        scale: float = 1.0,
        state_policy: str = "reset",
        warmup_after_refresh: int = 0,
        seed: int = 0,
        maximize: bool = False,
        decay: str = "selected",
        bank_dtype: str | torch.dtype = "float32",
        fused: bool = False,
    ) -> None:
        defaults = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        defaults["bank_dtype"] = str(bank_dtype).removeprefix("torch.")
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a checkpoint; keys that it lacks take their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its values against its tensors."""
        group = dict(param_group)
        if not isinstance(group["params"], Tensor):
            group["params"] = list(group["params"])
        if "bank_dtype" in group:
            group["bank_dtype"] = str(group["bank_dtype"]).removeprefix("torch.")
        validate_group({**self.defaults, **group})
        super().add_param_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimization step; ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        index, scratch = 0, ScratchPool()
        for group in self.param_groups:
            coefficients = GroupCoefficients(group)
            dense = []
            for p in group["params"]:
                if p.grad is None:
                    pass
                elif is_projected(p, group):
                    self._step_projected(p, group, index, coefficients, scratch)
                else:
                    dense.append(p)
                index += 1
            self._step_dense(dense, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit.

        ``Optimizer.load_state_dict`` casts state to the dtype and device of its parameter, which would round row
        indices and moments of bfloat16 weights and bring the bank to the device. So the state of projected weights
        bypasses it.
        """
        exact: dict[int, State] = {}
        before = self.register_load_state_dict_pre_hook(lambda _, loading: _take_projected(loading, exact))
        after = self.register_load_state_dict_post_hook(lambda _: self._finish_load(exact), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _finish_load(self, exact: dict[int, State]) -> None:
        for position, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if position not in exact and "step" in self.state[p]:
                self.state[p]["step"] = self.state[p]["step"].to(p.device)  # where torch's fused AdamW wants it
            elif position in exact:
                self.state[p] = {
                    key: value.to("cpu" if key in HOST_KEYS else p.device, copy=True)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in exact[position].items()
                }

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.layout != torch.strided:
                    raise TypeError(
                        f"GrassAdamW takes dense gradients, got {p.grad.layout} for a weight of {tuple(p.shape)}; "
                        "use sparse=False in the embedding or torch.optim.SparseAdam for it"
                    )

    def _step_dense(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Plain AdamW by torch's own fused (CPU, CUDA) or foreach implementation."""
        if not params:
            return
        fused = all(p.device.type in ("cpu", "cuda") for p in params)
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=fused or None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _step_projected(
        self, p: Tensor, group: dict[str, Any], index: int, coefficients: GroupCoefficients, scratch: ScratchPool
    ) -> None:
        """Choose new rows for one weight if that is due, then update its chosen rows."""
        assert p.grad is not None
        weight, grad, state = as_matrix(p.detach()), as_matrix(p.grad, like=p), self.state[p]
        if refresh_due(state, group):
            dim = resolve_dim(group["dim"], weight)
            norms = torch.linalg.vector_norm(grad, dim=1 - dim, dtype=moment_dtype(weight))
            if not refresh(state, weight, norms, dim, group, index):
                return
        state["step"] += 1
        projector = current_projector(state)
        step_coefficients = coefficients.at(state)
        if group["decay"] == "all":
            step_coefficients = decay_all_(weight, step_coefficients)
        moments = state["exp_avg"], state["exp_avg_sq"]
        hyperparameters = {key: group[key] for key in ("betas", "eps", "maximize")}
        if group["fused"]:
            compiled_project_and_step()(weight, projector, grad, *moments, step_coefficients, **hyperparameters)
        else:
            buffers = scratch.like(moments[0])
            project_and_step_(weight, projector, grad, *moments, step_coefficients, buffers, **hyperparameters)


def _take_projected(state_dict: dict[str, Any], taken: dict[int, State]) -> dict[str, Any]:
    """Move the state of projected weights from a state dict, shallowly copied, to ``taken``, keyed by position."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = state_dict["state"]
    taken.update((i, states[key]) for i, key in enumerate(keys) if "indices" in states.get(key, ()))
    bare = {key: {} if "indices" in state else state for key, state in states.items()}
    return {**state_dict, "state": bare}
