"""The three ways in which :class:`grass.GrassAdamW` steps a parameter: plain, projected, active."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from grass import cpu_kernel, kernels
from grass.active import adopt, arm, choose_rows, gathered_norms
from grass.background import Background
from grass.functional import ScratchPool, decay_all_, project_and_step_, step_active_
from grass.hyperparameters import as_matrix, resolve_dim, resolve_rank
from grass.kernels.dispatch import runs_triton, wants_triton
from grass.layers import CompactLayer
from grass.moments import State, shared_steps
from grass.precision import full_moments, rounding_key, shrink_
from grass.projector import Projector, is_column_major
from grass.ranks import Ranks
from grass.refresh import GroupCoefficients, carry_moments, current_projector, refresh, refresh_due
from grass.shards import aligned_grad, check_shards, local, row_norms


@dataclass(slots=True)
class ActiveRows:
    """The active rows of one converted layer, in a step."""

    rows: Tensor
    grad: Tensor
    layer: CompactLayer
    state: State
    index: int

    def row_major(self) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """``dim``, rows, gradient and moments; transposed, ``dim`` too, where columns are contiguous in memory."""
        dim, rows, grad = self.layer.dim, self.rows, self.grad
        exp_avg, exp_avg_sq = self.state["exp_avg"], self.state["exp_avg_sq"]
        if is_column_major(rows):
            return 1 - dim, rows.t(), grad.t(), exp_avg.t(), exp_avg_sq.t()
        return dim, rows, grad, exp_avg, exp_avg_sq


@dataclass
class GroupStep:
    """One step of one parameter group: what its parameters share.

    Attributes:
        chosen: the rows of every weight that has chosen rows in this step.
    """

    group: dict[str, Any]
    scratch: ScratchPool
    background: Background
    ranks: Ranks
    chosen: list[Tensor] = field(default_factory=list)
    coefficients: GroupCoefficients = field(init=False)
    _on_triton: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coefficients = GroupCoefficients(self.group)

    def plain(self, params: list[Tensor], states: list[State]) -> None:
        """Step parameters at full rank."""
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(_plain_state(p, self.group))
        grads = [local(aligned_grad(p)) for p in params]
        exp_avgs, exp_avg_sqs = [local(s["exp_avg"]) for s in states], [local(s["exp_avg_sq"]) for s in states]
        self._torch_adamw(list(map(local, params)), grads, exp_avgs, exp_avg_sqs, [s["step"] for s in states])

    def rounded(self, p: Tensor, grad: Tensor, state: State, index: int) -> None:
        """Step a half-precision parameter at full rank, its moments in its precision, all rounded stochastically."""
        if not state:
            state.update(_plain_state(p, self.group))
        state["step"] += 1
        group, key = self.group, rounding_key(self.group, index, int(state["step"]))
        parts = [local(t.detach()) for t in (p, grad, state["exp_avg"], state["exp_avg_sq"])]
        weight, *rest = (as_matrix(t) if t.ndim > 1 else t.reshape(1, -1) for t in parts)
        every = torch.arange(weight.shape[0], device=weight.device)
        lr = float(group["lr"])
        numbers = {"step_size": lr, "shrink": 1 - lr * group["weight_decay"]}
        kernels.compact_adamw_(
            weight, every, *rest, float(state["step"]), **numbers, **self._adam, key=key, moment_key=key
        )
        for t, stepped in ((parts[0], weight), (parts[2], rest[1]), (parts[3], rest[2])):
            if t.data_ptr() != stepped.data_ptr():  # a copy: channels_last
                t.copy_(stepped.view(t.shape))

    def projected(self, p: Tensor, grad: Tensor, state: State, index: int, norms: Tensor | None) -> None:
        """Choose new rows of a weight if that is due, by ``norms`` or its full gradient's; update them."""
        group, whole, whole_grad = self.group, as_matrix(p.detach()), as_matrix(grad)
        part, weight, grad = local(p.detach()), local(whole), local(whole_grad)
        if refresh_due(state, group):
            dim = resolve_dim(group["dim"], whole)
            rank = resolve_rank(group["rank"], whole.shape[dim])
            check_shards(whole, dim, "A weight")
            if norms is None:
                norms = row_norms(whole_grad, dim)
            if not refresh(state, carry_moments(state, weight, group, index), norms, dim, rank, group, index):
                return
            self.chosen.append(state["indices"])
        state["step"] += 1
        projector = current_projector(state)
        if projector.scale is None and self._in_one_pass(weight, grad):
            self._compact_adamw(weight, projector, grad, None, state, index)
        elif group["moment_dtype"] == "float32":
            self._project_and_step(weight, projector, grad, state)
        else:
            with full_moments(state, group["moment_dtype"], rounding_key(group, index, state["step"])):
                self._project_and_step(weight, projector, grad, state)
        if p.ndim > 2 and weight.data_ptr() != part.data_ptr():  # a copy: channels_last
            part.copy_(weight.view(part.shape))

    def _project_and_step(self, weight: Tensor, projector: Projector, grad: Tensor, state: State) -> None:
        exp_avg, exp_avg_sq, whole = state["exp_avg"], state["exp_avg_sq"], self.group["decay"] == "all"
        if self.group["fused"] and cpu_kernel.can_step(weight, grad, exp_avg, projector):
            numbers = self.coefficients.numbers(state)
            if whole:
                weight.mul_(numbers["shrink"])
                numbers["shrink"] = 1.0
            cpu_kernel.step_(weight, projector, grad, exp_avg, exp_avg_sq, **{**numbers, **self._adam})
            return
        coefficients = self.coefficients.at(state)
        if whole:
            coefficients = decay_all_(weight, coefficients)
        arguments = weight, projector, grad, exp_avg, exp_avg_sq, coefficients
        project_and_step_(*arguments, self.scratch.like(exp_avg), **self._adam)

    def active(self, every: list[ActiveRows]) -> None:
        """Update active rows, write them back, choose new ones where that is due."""
        group = self.group
        begun = self._begin(every)
        if group["decay"] == "all":
            for item in begun:
                shrink = 1 - group["lr"] * self.coefficients.warmup(item.state) * group["weight_decay"]
                item.layer.decay_(shrink, self._value_key(item.index, item.state))
        rest = [item for item in begun if not (self._kernel_step(item) or self._cpu_kernel_step(item))]
        shared = [item for item in rest if self._is_torch_adamw(item)]
        if shared:
            steps = [torch.tensor(float(shared_steps(i.state) - 1), device=i.rows.device) for i in shared]
            _, rows, grads, exp_avgs, exp_avg_sqs = map(list, zip(*(i.row_major() for i in shared), strict=True))
            self._torch_adamw(rows, grads, exp_avgs, exp_avg_sqs, steps, scale=group["scale"])
        for item in rest:
            if not self._is_torch_adamw(item):
                self._rowwise_adamw(item)
            item.layer.write_back(rounding_key(group, item.index, item.state["step"]))
        self._refresh([item for item in begun if refresh_due(item.state, group)])
        for item in begun:
            arm(item.layer, item.state, group)

    def _refresh(self, due: list[ActiveRows]) -> None:
        """Choose new rows from the sketches, summed over the ranks."""
        norms = gathered_norms([item.layer for item in due], self.ranks)
        for item, layer_norms in zip(due, norms, strict=True):
            carry = carry_moments(item.state, item.layer.matrix(), self.group, item.index, self.background)
            choose_rows(item.layer, layer_norms, item.state, carry, self.group, item.index)
            self.chosen.append(item.state["indices"])

    def _begin(self, every: list[ActiveRows]) -> list[ActiveRows]:
        """Count the step; makes the state in the first, which a fresh optimizer building its state leaves at that."""
        fresh = [item for item in every if not item.state]
        for item in fresh:
            adopt(item.layer, item.state, carry_moments(item.state, item.layer.matrix(), self.group, item.index))
        if fresh and not self.group["lr"]:
            moves = any(bool(item.grad.any()) for item in fresh)
            if not self.ranks.any(moves, fresh[0].grad.device):
                every = [item for item in every if item.state["step"] > 0]
        for item in every:
            item.state["step"] += 1
        return every

    def _is_torch_adamw(self, item: ActiveRows) -> bool:
        """Whether these rows step as an ordinary parameter under AdamW does: of one age, in one precision."""
        return (
            "row_steps" not in item.state
            and item.rows.dtype == item.state["exp_avg"].dtype
            and self.coefficients.warmup(item.state) == 1.0
        )

    def _rowwise_adamw(self, item: ActiveRows) -> None:
        """Step rows each at its own age, or in a precision of their own."""
        arguments, coefficients = item.row_major(), self.coefficients.at(item.state)
        step_active_(*arguments, coefficients, self.scratch.like(arguments[-1]), **self._adam)

    def _in_one_pass(self, values: Tensor, grad: Tensor) -> bool:
        """Whether rows go through :func:`grass.kernels.compact_adamw_`: on CUDA, and where precision asks for it."""
        if type(values) is not Tensor:
            return False
        if self.group["moment_dtype"] != "float32" or (self.group["stochastic_rounding"] and is_half(values.dtype)):
            return True
        device = values.device.type
        if device not in self._on_triton:
            self._on_triton[device] = wants_triton(device)
        return self._on_triton[device] and bool(runs_triton("compact_adamw_", values, grad))

    def _compact_adamw(
        self, weight: Tensor, projector: Projector, grad: Tensor, rows: Tensor | None, state: State, index: int
    ) -> None:
        """Step the rows of a weight, its own or ``rows``, by :func:`grass.kernels.compact_adamw_`."""
        precision, key = self.group["moment_dtype"], rounding_key(self.group, index, state["step"])
        numbers, value_key = self.coefficients.numbers(state), self._value_key(index, state)
        if rows is None and self.group["decay"] == "all":
            shrink_(weight, numbers["shrink"], value_key)
            numbers["shrink"] = 1.0
        native = precision == "bfloat16"  # stored by the kernel itself
        with full_moments(state, "float32" if native else precision, key) as moments:
            kernels.compact_adamw_(
                weight,
                projector.indices,
                grad,
                *moments,
                dim=projector.dim,
                rows=rows,
                gather_grad=rows is None,
                key=value_key,
                moment_key=key if native else None,
                **numbers,
                **self._adam,
            )

    def _value_key(self, index: int, state: State) -> int | None:
        """The key by which weights are rounded in this step; ``None`` rounds them to the nearest."""
        return rounding_key(self.group, index, state["step"]) if self.group["stochastic_rounding"] else None

    def _kernel_step(self, item: ActiveRows) -> bool:
        """Step rows and write them back in one pass, on CUDA and where precision asks for it."""
        if not self._in_one_pass(item.rows, item.grad):
            return False
        layer, projector = item.layer, item.layer.projector()
        if layer.scale() is None:
            self._compact_adamw(layer.matrix(), projector, item.grad, item.rows, item.state, item.index)
        else:  # codes: the rows are stepped by themselves
            every = Projector(torch.arange(projector.indices.numel(), device=item.rows.device), None, layer.dim)
            self._compact_adamw(item.rows, every, item.grad, None, item.state, item.index)
            layer.write_back(rounding_key(self.group, item.index, item.state["step"]))
        return True

    def _cpu_kernel_step(self, item: ActiveRows) -> bool:
        """Step rows and write them back in one pass, where the CPU kernel can."""
        if not self.group["fused"] or item.layer.scale() is not None:
            return False
        layer, state = item.layer, item.state
        weight, exp_avg, exp_avg_sq = layer.matrix(), state["exp_avg"], state["exp_avg_sq"]
        if not cpu_kernel.can_step_active(layer.dim, weight, item.rows, item.grad, exp_avg, exp_avg_sq):
            return False
        numbers = {**self.coefficients.numbers(state), **self._adam}
        cpu_kernel.step_active_(layer.dim, weight, layer.selected, item.rows, item.grad, exp_avg, exp_avg_sq, **numbers)
        return True

    def _torch_adamw(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        scale: float = 1.0,
    ) -> None:
        """AdamW by torch's own fused (CPU, CUDA) or foreach implementation; counts ``steps``."""
        if not params:
            return
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=all(map(has_fused_adamw, params)) or None,
            amsgrad=False,
            beta1=self.group["betas"][0],
            beta2=self.group["betas"][1],
            lr=self.group["lr"] * scale,
            weight_decay=self.group["weight_decay"] / scale,  # decay is not multiplied by scale
            eps=self.group["eps"],
            maximize=self.group["maximize"],
        )

    @property
    def _adam(self) -> dict[str, Any]:
        return {key: self.group[key] for key in ("betas", "eps", "maximize")}


def is_half(dtype: torch.dtype) -> bool:
    """Whether values of this type are rounded stochastically if the group says so."""
    return dtype in (torch.bfloat16, torch.float16)


def step_device(p: Tensor, group: dict[str, Any]) -> torch.device | str:
    """Where torch's AdamW, or the step with stochastic rounding, wants the step count of a plain parameter."""
    return p.device if has_fused_adamw(p) and not (group["stochastic_rounding"] and is_half(p.dtype)) else "cpu"


def _plain_state(p: Tensor, group: dict[str, Any]) -> State:
    moments = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=step_device(p, group)), **moments}


def has_fused_adamw(p: Tensor) -> bool:
    """Whether torch has a fused AdamW for this tensor."""
    return p.device.type in ("cpu", "cuda")
