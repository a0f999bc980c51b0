"""The one hook that Grass sets on all optimizers of a process. What wants to know of their steps registers here."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Call = Callable[[Optimizer], None]

_BEFORE: dict[Call, None] = {}
_AFTER: dict[Call, None] = {}
_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that tell of the ends of their steps."""


def before_every_step(call: Call) -> Callable[[], None]:
    """Call a function with the optimizer before each step of any ``torch.optim`` optimizer.

    Returns:
        A function that ends this.
    """
    _BEFORE[call] = None
    _register()
    return functools.partial(_BEFORE.pop, call, None)


def after_every_step(call: Call) -> Callable[[], None]:
    """As :func:`before_every_step`, after each step."""
    _AFTER[call] = None
    _register()
    return functools.partial(_AFTER.pop, call, None)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for call in list(_BEFORE):
        call(optimizer)
    if _AFTER and optimizer not in _SEEN:
        optimizer.register_step_post_hook(_after)
        _SEEN.add(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for call in list(_AFTER):
        call(optimizer)
