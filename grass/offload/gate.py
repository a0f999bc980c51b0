"""Where the next forward waits for values that are still on their way.

Active rows of converted layers need no gate: their layer waits when it is used. Other parameters wait at the entry of a
module whose forward uses them, found in the first forward:

- a *block*, an item of the outermost ``ModuleList`` or ``Sequential``, waits for all parameters in it;
- the outermost module waits for all others that it holds: embeddings, head, norms, and what modules share. So do the
  modules between it and the blocks, for the case that one is called by itself: the model inside DDP, to evaluate.

So a parameter is on the device before any code of its block runs, also where another module than its owner reads it.
Parameters that no such module holds (or whose module is compiled, which hooks do not enter) are waited for in ``step``.
``state_dict`` of a module waits too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Wait = Callable[[Iterable[Tensor]], None]


class Gate:
    """Makes modules wait for their parameters.

    Args:
        wait: waits for some parameters.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = weakref.WeakMethod(wait)  # type: ignore[type-var]
        self._order: dict[Tensor, int] = {}
        self._guarded: set[Tensor] = set()
        self._parameters: set[Tensor] = set()
        self._search: RemovableHandle | None = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Find the modules that hold these parameters, in the next forward."""
        self._parameters.update(parameters)
        if self._search is None and not self._guarded:
            reference = weakref.ref(self)

            def search(module: nn.Module, args: Any) -> None:
                if (gate := reference()) is not None:
                    gate._found(module)

            self._search = register_module_forward_pre_hook(_untraced(search))
            weakref.finalize(self, self._search.remove)

    def guards(self, p: Tensor) -> bool:
        """Whether a module waits for this parameter."""
        return p in self._guarded

    def order(self, parameters: list[Tensor]) -> list[Tensor]:
        """Parameters as the forward comes to them: those of the outermost module, then block by block."""
        last = len(self._order)
        return sorted(parameters, key=lambda p: self._order.get(p, last))

    def _found(self, module: nn.Module) -> None:
        """Guard the parameters of the outermost module of a forward, if it holds any."""
        held = [p for p in module.parameters() if p in self._parameters]
        if not held:
            return
        assert self._search is not None
        self._search.remove()
        self._search = None
        blocks = [] if _is_compiled(module) else list(_blocks(module))
        owners = Counter(p for submodule in module.modules() for p in submodule.parameters(recurse=False))
        inside = {p for block in blocks for p in block.parameters() if owners[p] == 1}
        outside = [p for p in held if p not in inside]
        self._guard(module, outside)
        self._wait_for(outside)
        for inner in _between(module):
            held_inside = {*inner.parameters()}
            if waiting := [p for p in outside if p in held_inside]:
                inner.register_forward_pre_hook(self._eager_hook(waiting))
        for block in blocks:
            self._guard(block, [p for p in block.parameters() if p in self._parameters and p in inside])
        for submodule in module.modules():
            own = [p for p in submodule.parameters(recurse=False) if p in self._parameters]
            if own:
                submodule.register_state_dict_pre_hook(self._hook(own))

    def _guard(self, module: nn.Module, parameters: list[Tensor]) -> None:
        new = [p for p in parameters if p not in self._guarded]
        self._order.update({p: len(self._order) + i for i, p in enumerate(new)})
        self._guarded.update(new)
        if parameters:
            module.register_forward_pre_hook(self._hook(parameters))

    def _wait_for(self, parameters: list[Tensor]) -> None:
        wait = self._wait()
        if wait is not None:
            wait(parameters)

    def _eager_hook(self, parameters: list[Any]) -> Callable[..., None]:
        """A hook that compilation leaves out: then the outermost module has waited."""
        wait = self._hook(parameters)

        def hook(*unused: Any, **also_unused: Any) -> None:
            if not torch.compiler.is_compiling():
                wait()

        return hook

    def _hook(self, parameters: list[Tensor]) -> Callable[..., None]:
        reference = weakref.ref(self)

        def hook(*unused: Any, **also_unused: Any) -> None:
            if (gate := reference()) is not None:
                gate._wait_for(parameters)

        return _untraced(hook)


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    untraced: Callable[..., None] = torch.compiler.disable(hook, reason="it waits for the host")  # type: ignore[no-untyped-call]
    return untraced


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists of modules, unless one of them is compiled."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            items = list(child.children())
            if not any(_is_compiled(part) for item in items for part in item.modules()):
                yield from items
        else:
            yield from _blocks(child)


def _between(module: nn.Module) -> Iterator[nn.Module]:
    """All modules inside a module, down to lists of modules."""
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield child
            yield from _between(child)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
