"""Where the next forward waits for values that are still on their way.

Active rows of converted layers need no hook: their layer waits when it is used. Other parameters wait at the entry of a
module, found in the first forward:

- a *block*, an item of the outermost ``ModuleList`` or ``Sequential`` that has run, waits for all parameters in it;
- the outermost module waits for all others that it holds: embeddings, head, norms, and what modules share. So does each
  module between it and the blocks, and each beside them: any of them may be called without the outermost one;
- a module inside a block, which may be called without it, waits for the parameters that are its own.

So a parameter is on the device before any code of its block runs, also where another module than its owner reads it. If
a part is compiled, there are no blocks, and the outermost module waits for active rows too: compiled layers do not.
FSDP2 reads its shards at the entry of the module that it wraps. A block waits for sharded parameters if that module is
the block or inside it, the outermost module for others, and for all if forwards are prefetched. Sharded active rows are
waited for like other parameters.

Parameters that no such module holds are waited for in ``step``, and so are those of a module after
``module.compile()``, which hooks do not enter. ``state_dict`` and ``load_state_dict`` of a module, its copies and its
pickles wait too. Code that reads a parameter in another way right after a step calls ``optimizer.offload.finish()``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import Listener, copy_parameters_last
from grass.parallel.shards import is_sharded
from grass.private_names import has_compiled_call, is_compiled, prefetches

Parameters = dict[Tensor, None]
"""A set in order."""
Use = Literal["forward", "saving", "loading"]
"""What parameters are waited for."""
Wait = Callable[[Iterable[Tensor], Use], None]
"""Waits for parameters before a use: :meth:`grass.offload.host_optimizer.HostOptimizer.wait_for`."""


class ForwardHooks:
    """Makes modules wait for their parameters.

    Args:
        wait: a method, whose object is not kept alive.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._order: dict[Tensor, int] = {}
        self._guarded: set[Tensor] = set()
        self._parameters: set[Tensor] = set()
        self._sets: list[Parameters] = []
        self._search: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Find the modules that hold these parameters, in the next forward."""
        self._parameters.update(parameters)
        if self._search is None and not self._handles:
            reference = weakref.ref(self)

            def search(module: nn.Module, args: Any) -> None:
                if (hooks := reference()) is not None:
                    hooks._found(module)

            untraced: Callable[..., None] = torch.compiler.disable(search, reason="it waits for the host")  # type: ignore[no-untyped-call]
            self._search = register_module_forward_pre_hook(untraced)
            weakref.finalize(self, self._search.remove)

    def guards(self, p: Tensor) -> bool:
        """Whether a module waits for this parameter."""
        return p in self._guarded

    def order(self, parameters: list[Tensor]) -> list[Tensor]:
        """Parameters as the forward comes to them: those of the outermost module, then block by block."""
        last = len(self._order)
        return sorted(parameters, key=lambda p: self._order.get(p, last))

    def pass_by(self, number: int, *, is_block: bool) -> None:
        """Wait for a set of parameters. A block that runs takes its own from the outermost module."""
        self.wait_for(self._sets[number])
        if is_block:
            for p in self._sets[number]:
                self._sets[0].pop(p, None)

    def settle(self, number: int | None, before: Use = "saving") -> None:
        """Wait for a set of parameters, or for all, before they are saved or loaded."""
        self.wait_for(self._parameters if number is None else self._sets[number], before)

    def wait_for(self, parameters: Iterable[Tensor], before: Use = "forward") -> None:
        """Wait, unless the optimizer is gone."""
        if (wait := self._wait()) is not None:
            wait(list(parameters), before)

    def _found(self, module: nn.Module) -> None:
        """Guard the parameters of the outermost module of a forward, if it holds any."""
        compiled = any(map(is_compiled, module.modules()))
        held = self._held(module, with_rows=compiled)
        if not held or self._search is None:
            return
        if not self._handles:
            try:
                self._register(module, held, [] if compiled else list(_blocks(module)))
            except BaseException:  # an interrupt: the next forward begins again
                _remove(self._handles)
                self._guarded, self._order, self._sets = set(), {}, []
                raise
        self._search.remove()
        self._search = None
        self.wait_for(held)

    def _register(self, module: nn.Module, held: Parameters, blocks: list[nn.Module]) -> None:
        owners = Counter(p for submodule in module.modules() for p in submodule.parameters(recurse=False))
        late = {p for p in held if is_sharded(p)} if _prefetches(module) else set()
        inside: list[Parameters] = [
            {p: None for p in _read_within(block) if p in held and owners[p] == 1 and p not in late} for block in blocks
        ]
        self._sets = [held, *inside]
        if not has_compiled_call(module):
            blocked = {p: None for own in inside for p in own}
            order = [*(p for p in held if p not in blocked), *blocked]
            self._order.update((p, i) for i, p in enumerate(order))
            self._guarded.update(order)
        outside = list(_without(module, set(blocks)))
        for part in outside:
            self._enter(part, _Hook(self, 0, in_graph=part is not module))
        for number, block in enumerate(blocks, 1):
            self._enter(block, _Hook(self, number, is_block=True))
        for part in module.modules():
            if (
                isinstance(part, CompactLayer)
                and part.active in self._guarded
                and (own_hook := ActiveRowsHook.of(part))
            ):
                own_hook.guarded = True
            own: Parameters = {p: None for p in part.parameters(recurse=False) if p in held}
            if own:
                self._sets.append(own)
                saved, number = cast("Any", part), len(self._sets) - 1  # untyped in torch
                self._handles.append(saved.register_state_dict_pre_hook(_Hook(self, number, "saving")))
                self._handles.append(saved.register_load_state_dict_pre_hook(_Hook(self, number, "loading")))
                if part not in blocks and part not in outside:
                    self._enter(part, _Hook(self, len(self._sets) - 1, in_graph=True))

    def _enter(self, part: nn.Module, hook: _Hook) -> None:
        """Let a hook run when a module is called, before those of FSDP2, and when it is copied."""
        self._handles.append(part.register_forward_pre_hook(hook, prepend=True))
        copy_parameters_last(part)

    def _held(self, module: nn.Module, with_rows: bool = False) -> Parameters:
        layers = [part for part in module.modules() if isinstance(part, CompactLayer)]
        rows = {layer.active for layer in layers if not with_rows and not is_sharded(layer.active)}
        return {p: None for p in module.parameters() if p in self._parameters and p not in rows}


class _Hook:
    """Waits for parameters. It does not keep the hooks alive. Copying it waits for all; the copy waits for nothing.

    Args:
        hooks: what waits; ``None``, as in a copy: nothing.
        number: of the set of parameters.
        before: what the hook comes before.
        is_block: whether it is the hook of a block.
        in_graph: compiled code skips this hook, because the compiled module has waited before.
    """

    def __init__(
        self,
        hooks: ForwardHooks | None = None,
        number: int = 0,
        before: Use = "forward",
        *,
        is_block: bool = False,
        in_graph: bool = False,
    ) -> None:
        self._hooks = None if hooks is None else weakref.ref(hooks)
        self._number, self._before = number, before
        self._is_block, self._in_graph = is_block, in_graph

    def __call__(self, *unused: Any, **also_unused: Any) -> None:
        if not (self._in_graph and torch.compiler.is_compiling()):
            self._wait()

    @torch.compiler.disable(reason="it waits for the host")  # type: ignore[no-untyped-call, untyped-decorator]
    def _wait(self) -> None:
        if (hooks := self._waiting()) is None:
            return
        if self._before == "forward":
            hooks.pass_by(self._number, is_block=self._is_block)
        else:
            hooks.settle(self._number, self._before)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        """Modules copy their hooks first (:func:`copy_parameters_last`), so values arrive before they are copied."""
        if (hooks := self._waiting()) is not None:
            hooks.settle(None)
        return _Hook, ()

    def _waiting(self) -> ForwardHooks | None:
        return None if self._hooks is None else self._hooks()


class ActiveRowsHook(Listener):
    """Waits for the active rows of a layer before the layer reads its values.

    Args:
        wait: a method, whose object is not kept alive.

    Attributes:
        rows: the active rows.
        guarded: whether a module around the layer waits for them, so that compiled code need not.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait_for = weakref.WeakMethod(wait)
        self.rows: weakref.ref[Tensor] | None = None
        self.guarded = False

    @classmethod
    def watch(cls, layer: CompactLayer, wait: Wait) -> None:
        """Let a layer wait for its active rows, as they are now, and for no others."""
        hook = cls.of(layer)
        if hook is None or hook._wait_for() != wait:
            others = tuple(listener for listener in layer.listeners if listener is not hook)
            hook = cls(wait)
            layer.listeners = (*others, hook)
        hook.rows = weakref.ref(layer.active)

    @classmethod
    def of(cls, layer: CompactLayer) -> ActiveRowsHook | None:
        """The hook of a layer."""
        return next((listener for listener in layer.listeners if isinstance(listener, cls)), None)

    def before_use(self) -> None:
        """Wait."""
        if not (self.guarded and torch.compiler.is_compiling()):
            self._wait()

    def before_saving(self) -> None:
        """Wait, or raise an error if the values are lost."""
        self._wait("saving")

    def before_loading(self) -> None:
        """Wait."""
        self._wait("loading")

    @torch.compiler.disable(reason="it waits for the host")  # type: ignore[no-untyped-call, untyped-decorator]
    def _wait(self, before: Use = "forward") -> None:
        wait, rows = self._wait_for(), None if self.rows is None else self.rows()
        if wait is not None and rows is not None:
            wait([rows], before)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _without(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those in it, without blocks and what is in them."""
    seen = set(blocks)
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if part not in seen:
            seen.add(part)
            yield part
            waiting.extend(part.children())


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists of modules."""
    if isinstance(module, nn.Sequential):
        yield from module.children()
        return
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from child.children()
        else:
            yield from _blocks(child)


def _read_within(block: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a block that nothing reads before the block is called."""
    gathered = {p for part in block.modules() if hasattr(part, "unshard") for p in part.parameters()}
    yield from (p for p in block.parameters() if not is_sharded(p) or p in gathered)


def _prefetches(module: nn.Module) -> bool:
    """Whether FSDP2 was told to read the shards of modules before they are called."""
    return any(prefetches(part) for part in module.modules())
