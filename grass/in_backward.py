"""Stepping in backward: each parameter is stepped, and its gradient freed, as soon as the gradient is complete.

The gradients of a model then never exist together. All rows of dense mode still move, from exact gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle

from grass.optimizer import GrassAdamW
from grass.options import parameter_names
from grass.parallel.ranks import Ranks
from grass.parallel.shards import is_sharded
from grass.private_names import NO_BACKWARD, at_end_of_backward, gradient_hooks, running_backward, set_steps_with_scaler
from grass.step_checks import check_gradients
from grass.stepping.optimizer_step import OptimizerStep

ACCUMULATED = (
    "gradients cannot be accumulated. Call optimizer.step() after each backward; if the parameter is shared between "
    "checkpointed segments, checkpoint with use_reentrant=False"
)
STOPPED = (
    "an earlier backward was stopped, by an error, when it had stepped some of the parameters. Call "
    "optimizer.zero_grad() and optimizer.step(), which ends that step, before the next backward. Without an error: a "
    "parameter that checkpointed segments share needs use_reentrant=False"
)
"""Why a parameter got a second gradient."""


def step_in_backward(optimizer: GrassAdamW, *, max_norm: float | None = None) -> InBackward:
    """Step each parameter inside ``backward()`` as soon as its gradient is complete, then free the gradient.

    The training loop does not change: ``backward()``, ``optimizer.step()``, scheduler, ``zero_grad()``.
    ``optimizer.step()`` ends the step. It also steps parameters whose gradient was set by hand. Without ``max_norm``
    the weights and the state equal those of the ordinary loop bit for bit, and so do resumed runs. Copies and pickles
    of model and optimizer step in backward, too. Set the learning rate before ``backward()``.

    ``clip_grad_norm_`` finds no gradients, and the norm of the whole gradient is known too late. Therefore ``max_norm``
    limits each parameter separately: a gradient whose own norm exceeds ``max_norm`` is scaled down to it, as by
    ``clip_grad_norm_([parameter], max_norm)``. The norm of the whole gradient may then exceed ``max_norm``.

    Two backward passes before ``optimizer.step()`` must not reach the same parameter, so gradients cannot be
    accumulated. A parameter that several checkpointed segments share needs ``use_reentrant=False``.

    Args:
        optimizer: a :class:`grass.GrassAdamW` in dense mode, or at full rank, on one process.
        max_norm: largest norm of each parameter's gradient. ``math.inf`` does not clip but measures
            :attr:`InBackward.grad_norm`; ``None`` does neither.

    Returns:
        The handle, whose ``close()`` restores ordinary steps.

    Errors:
        ``TypeError`` for another optimizer. ``ValueError`` for a ``max_norm`` out of range, converted layers (compact
        mode), sharded parameters (FSDP, tensor parallelism), more than one process, and parameters that another
        optimizer steps in backward. During training ``RuntimeError``: in a second backward pass that reaches a stepped
        parameter; in ``optimizer.step`` for a closure and for ``GradScaler``, whose scale is not known in backward (the
        first, scaled, backward pass has then changed the weights).

    Example:
        >>> handle = grass.step_in_backward(optimizer)
        >>> loss.backward()  # steps
        >>> optimizer.step()  # ends the step
    """
    if not isinstance(optimizer, GrassAdamW):
        raise TypeError(f"optimizer must be a grass.GrassAdamW, got {type(optimizer).__name__}")
    if max_norm is not None and not isinstance(max_norm, (int, float)):
        raise TypeError(f"Invalid {max_norm=}: must be a number > 0 or None")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"Invalid {max_norm=}: must be a number > 0 or None")
    if optimizer.in_backward is not None:
        raise ValueError("This optimizer steps in backward already: call close() of its handle first")
    return InBackward(optimizer, max_norm)


class InBackward:
    """The handle that :func:`step_in_backward` returns; the optimizer holds it too."""

    def __init__(self, optimizer: GrassAdamW, max_norm: float | None) -> None:
        _check_supported(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._max_norm = max_norm
        self.rebuild: Callable[[GrassAdamW], Any] = partial(InBackward, max_norm=max_norm)
        self._hook = _hook_of(self)
        self._registered: dict[Tensor, RemovableHandle] = {}
        self._places: dict[Tensor, tuple[dict[str, Any], int]] = {}
        self._norms: list[Tensor] = []
        self._lock = threading.Lock()  # every device has a thread in backward
        self._running: int | None = None  # torch's number of the backward pass that has stepped first and not ended
        self._watch(optimizer)
        optimizer.in_backward = self
        set_steps_with_scaler(optimizer, True)

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the whole gradient in the last backward pass, before clipping; zero with ``max_norm=None``."""
        return get_total_norm(self._norms)

    def close(self) -> None:
        """Step in ``optimizer.step()`` again. Call it between two steps.

        Raises:
            RuntimeError: a step has begun in backward, and ``optimizer.step()`` has not ended it.
        """
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.in_backward is self:
            if optimizer._going_on is not None:
                raise RuntimeError("A step has begun in backward: call optimizer.step() before close()")
            optimizer.in_backward = None
            set_steps_with_scaler(optimizer, False)
        for hook in self._registered.values():
            hook.remove()
        self._registered.clear()

    remove = close  # the earlier name, for one release

    def take(self, p: Tensor) -> None:
        """Step a parameter by its gradient and free the gradient."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock, torch.no_grad():
            whole = self._begin(optimizer)
            stopped = self._enter_pass()
            if p not in self._places:  # taken out of its group
                return
            group, position = self._places[p]
            if id(p) in whole.stepped:
                name, why = _name(group, p, position), STOPPED if stopped else ACCUMULATED
                raise RuntimeError(
                    f"{name} got a gradient again before optimizer.step(), but backward has stepped it: {why}"
                )
            check_gradients([{**group, "params": [p]}])
            if self._max_norm is not None:
                self._norms.append(clip_grad_norm_([p], self._max_norm))
            if optimizer._lost.noting:
                optimizer._lost.note(p, group, whole.layers)
            whole.advance(group, [(position, p)])
            p.grad = None

    def finish(self, optimizer: GrassAdamW, closure: Callable[[], float] | None) -> None:
        """Step the parameters that still have a gradient; ``optimizer.step`` calls this before it ends the step.

        Raises:
            RuntimeError: for a closure, for ``GradScaler``, and for gradients of parameters that have been stepped.
        """
        if closure is not None:
            raise RuntimeError("A closure runs backward inside step(), which stepping in backward cannot: pass none")
        if hasattr(optimizer, "found_inf"):
            raise RuntimeError(
                "GradScaler cannot be used with step_in_backward: backward steps before the scale is known. Train in "
                "float32 or bfloat16 without a scaler"
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.take(p)
        self._watch(optimizer)
        self._running = None

    def _enter_pass(self) -> bool:
        """Take note of the backward pass that runs now. Returns whether an earlier one has begun and not ended."""
        now = running_backward()
        if now != NO_BACKWARD and self._running is None:
            self._running = now
            at_end_of_backward(self._leave_pass)
        return now != NO_BACKWARD and self._running != now

    def _leave_pass(self) -> None:
        """Called at the end of a backward pass without an error."""
        self._running = None

    def _begin(self, optimizer: GrassAdamW) -> OptimizerStep:
        """The current step. The first gradient begins it."""
        if optimizer._going_on is None:
            _check_supported(optimizer)
            optimizer._going_on = optimizer.begin_step()
            self._norms = []
            every = [(p, group) for group in optimizer.param_groups for p in group["params"]]
            self._places = {p: (group, position) for position, (p, group) in enumerate(every)}
        return optimizer._going_on

    def _watch(self, optimizer: GrassAdamW) -> None:
        """Register the hook on parameters that train and do not have it: groups may be added, weights unfrozen."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        new = [p for p in every if p.requires_grad and p not in self._registered]
        for p in new:
            _check_free(p)
        self._registered.update((p, p.register_post_accumulate_grad_hook(self._hook)) for p in new)


def _hook_of(handle: InBackward) -> Callable[[Tensor], None]:
    """A hook that passes a parameter to the handle. It holds the handle weakly, so that both can be freed."""
    reference = weakref.ref(handle)

    def hook(p: Tensor) -> None:
        if (found := reference()) is not None:
            found.take(p)

    untraced: Any = torch.compiler.disable(hook, reason="it steps an optimizer")  # type: ignore[no-untyped-call]
    untraced.handle = reference
    return cast("Callable[[Tensor], None]", untraced)


def _check_supported(optimizer: GrassAdamW) -> None:
    if optimizer.offload is not None:
        raise ValueError("step_in_backward takes an optimizer whose state is on the device: build it without offload=")
    if optimizer.held_layers:
        raise ValueError(
            f"step_in_backward takes dense mode, but {len(optimizer.held_layers)} layers were converted by "
            "grass.compact(), which keeps gradients small already"
        )
    for group in optimizer.param_groups:
        for p in group["params"]:
            if is_sharded(p):
                raise ValueError(f"step_in_backward takes whole parameters, got a DTensor of shape {tuple(p.shape)}")
    ranks = Ranks.of(optimizer.process_group)
    if ranks.group is not None:
        raise ValueError(
            f"step_in_backward takes one process, got {ranks.group.size()}: backward would step by the gradient of "
            "this process, before DDP averages. If the processes train separate models, set optimizer.process_group"
        )


def _check_free(p: Tensor) -> None:
    for hook in gradient_hooks(p):
        if isinstance(getattr(hook, "handle", lambda: None)(), InBackward):
            raise ValueError(
                f"A parameter of shape {tuple(p.shape)} is stepped in backward by another optimizer: call close() of "
                "that handle first"
            )


def _name(group: dict[str, Any], p: Tensor, position: int) -> str:
    index = next(i for i, other in enumerate(group["params"]) if other is p)
    return parameter_names(group, position - index)[index]
