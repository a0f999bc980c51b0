"""A unit's forward: its tensors come to the device, the module computes with them, and the host keeps its own."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grass.private_names import (
    NO_BACKWARD,
    checkpoints_with_cache,
    is_in_ddp_forward,
    running_backward,
    tree_flatten,
    tree_unflatten,
)
from grass.streaming.activations import HostActivation, HostActivations
from grass.streaming.gradients import HostGradients
from grass.streaming.host_block import HostBlock, Place
from grass.streaming.micro_batches import MicroBatches
from grass.streaming.prefetch import BACKWARD, FORWARD, INFERENCE, Prefetcher

Buffers = dict[int, Tensor]
"""Buffers that a forward has changed, as they were before it, by their place in the unit. Backward needs them."""


class StreamedBlock(nn.Module):
    """What the class of a unit gets from :func:`grass.stream`, before the unit's own class.

    Copies and pickles are of the unit's own class, on the host.
    """

    not_convertible = "The model is streamed: call grass.compact() and grass.expand() before or after close()"

    _block_forward: BlockForward | None = None
    _computing: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's own forward, on the device."""
        kind: Any = type(self)
        if not issubclass(kind, StreamedBlock):
            raise RuntimeError("The stream was closed between this forward and its backward")
        own = self._computing or super().forward
        if self._block_forward is None:
            return own(*args, **kwargs)
        return self._block_forward.run(own, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the unit's own forward; its tensors come outside of the graph."""
        self._computing = torch.compile(super().forward, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamedBlock:
        """Casts change the unit; it stays on the host."""
        if self._block_forward is not None:
            self._block_forward.rest()
        super()._apply(_staying(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = plain_class(type(self))
        plain = kind.__new__(kind)
        vars(plain).update(
            {key: value for key, value in vars(self).items() if key not in ("_block_forward", "_computing")}
        )
        how, _, *state = plain.__reduce_ex__(protocol)
        new: Any = copyreg  # untyped
        return (new._reconstructor, (kind, object, None), *state) if how is new.__newobj__ else (how, _, *state)


def plain_class(streamed: type) -> type:
    """The class that a unit had before."""
    plain: type = streamed.__mro__[2]
    return plain


@functools.cache
def streamed_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a unit of a streamed model."""
    return type(f"Streamed{plain.__name__}", (StreamedBlock, plain), {"__module__": plain.__module__})


class BlockForward:
    """Runs one unit on the device.

    Args:
        number: of the unit.
        unit: on the host.
        prefetcher: brings the unit's tensors.
        gradients: takes gradients to the host.
        activations: takes the unit's inputs to the host; ``None`` leaves them on the device.
        micro_batches: of micro-batches that pass through the model together.
    """

    def __init__(
        self,
        number: int,
        unit: HostBlock,
        prefetcher: Prefetcher,
        gradients: HostGradients,
        activations: HostActivations | None,
        micro_batches: MicroBatches,
    ) -> None:
        self._number, self._unit, self._prefetcher = number, unit, prefetcher
        self._gradients, self._activations, self._micro_batches = gradients, activations, micro_batches

    def rest(self) -> None:
        """Let nothing read or change tensors of units."""
        self._prefetcher.rest()

    @torch.compiler.disable(recursive=False, reason="the unit's tensors come from the host")  # type: ignore[untyped-decorator, no-untyped-call]
    def run(self, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute ``own(*args, **kwargs)`` with the unit's tensors on the device.

        With gradients only the inputs are kept, and backward computes the forward again.
        """
        module: Any = self._unit.module
        if is_in_ddp_forward():
            raise RuntimeError("A streamed model computes on one device: use FSDP2's CPUOffloadPolicy instead of DDP")
        if not torch.is_grad_enabled():
            return self._compute(own, args, kwargs)
        if getattr(module, "gradient_checkpointing", False) and module.training:  # transformers does the same
            if self._activations is not None and not _in_backward():
                raise ValueError("offload_activations=True needs gradient_checkpointing_disable(): it is done here")
            return self._compute(own, args, kwargs)
        if not checkpoints_with_cache(module):
            args = [_without_cache(value) for value in args]
            kwargs = {key: _without_cache(value) for key, value in kwargs.items()}
        anchor = torch.empty(0, device=self._prefetcher.device)  # by it checkpoint knows whose random state to keep
        self._micro_batches.pass_on()
        out = checkpoint(self._checked(self._computation(own, args, kwargs)), anchor, use_reentrant=False)
        return self._micro_batches.at_backward(out)

    def _checked(self, compute: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The computation, which fails in backward if the unit has been stepped since it ran."""
        before: list[int] = []

        def checked(anchor: Tensor) -> Any:
            if before and before != self._versions():
                raise RuntimeError(
                    f"The parameters of {self._unit.name} have changed between forward and backward, which would "
                    "compute with the new ones: call backward before optimizer.step()"
                )
            out = compute(anchor)
            before[:] = self._versions()
            return out

        return checked

    def _versions(self) -> list[int]:
        """The versions of the parameters that train."""
        return [p._version for p in self._unit.module.parameters() if p.requires_grad]

    def _computation(self, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
        """The computation with these inputs. Activations among them may go to the host until it runs again."""
        buffers: Buffers = {}
        if (activations := self._activations) is None:
            return lambda anchor: self._compute(own, args, kwargs, buffers)
        given: Any = args, kwargs
        values, tree = tree_flatten(given)
        kept = [activations.keep(v) if isinstance(v, Tensor) and v.requires_grad else v for v in values]

        def compute(anchor: Tensor) -> Any:
            nonlocal given
            inputs, given = given, None
            if inputs is None:
                inputs = tree_unflatten([v.get() if isinstance(v, HostActivation) else v for v in kept], tree)
            return self._compute(own, inputs[0], inputs[1], buffers)

        return compute

    def _compute(
        self, own: Callable[..., Any], args: Any, kwargs: dict[str, Any], buffers: Buffers | None = None
    ) -> Any:
        """Run the unit's forward with its tensors on the device."""
        grad = torch.is_grad_enabled()
        kind = BACKWARD if _in_backward() else FORWARD if grad else INFERENCE
        if kind == BACKWARD:
            self._gradients.begin_unit()
        else:  # while the layers have their own active rows, whose gradients tell
            for layer in self._unit.layers:
                layer.renew_sketch()
        tensors = self._prefetcher.use(self._number, kind, probe=grad)
        try:
            with self._there(tensors, grad, buffers):
                return own(*args, **kwargs)
        except BaseException:
            self._unit.take_back()  # an interrupt may have come where they are taken back
            raise

    @contextmanager
    def _there(self, tensors: list[Tensor], grad: bool, buffers: Buffers | None) -> Iterator[None]:
        """Put tensors on the device into the modules of the unit; fill ``buffers``, or in backward use them."""
        unit, gradients = self._unit, self._gradients
        here = unit.lend()
        there = [*tensors, *(_shape_of(place.get(), self._prefetcher.device) for place in unit.active)]
        sketches = [(layer, layer.sketch, layer.signs) for layer in unit.layers if layer.sketch is not None]
        versions, again, before = [tensor._version for tensor in tensors], _in_backward(), Buffers()
        if buffers is not None and again:
            there = [buffers[i].clone() if i in buffers else tensor for i, tensor in enumerate(there)]
        elif buffers is not None:
            before = {i: tensor.clone() for i, tensor in enumerate(tensors) if here[i][0].kind == "_buffers"}
        try:
            for (place, own), visiting in zip(here, there, strict=True):
                place.put(gradients.arrive(own, visiting) if grad and own.requires_grad else visiting)
            for layer, sketch, signs in sketches:
                assert sketch is not None
                layer.sketch = gradients.arrive(sketch, _shape_of(sketch, self._prefetcher.device)) if grad else None
                layer.signs = None if signs is None else signs.to(self._prefetcher.device)
            yield
            changed = [] if again else _copy_back(here, tensors, versions)
            if buffers is not None:
                buffers |= {i: before[i] for i in changed}
        finally:
            unit.take_back()
            if versions != [tensor._version for tensor in tensors]:
                self._prefetcher.drop(self._number)


@torch.no_grad()
def _copy_back(here: list[tuple[Place, Tensor]], there: list[Tensor], versions: list[int]) -> list[int]:
    """Copy the buffers of modules that have changed or replaced one to the host: batch norm does not count all.

    Returns:
        Their places in the unit.
    """
    known = zip(here, there, versions, strict=False)
    modules = {id(place.tensors) for (place, _), tensor, version in known if tensor._version != version}
    changed = []
    for i, ((place, own), tensor) in enumerate(zip(here, there, strict=False)):
        now = place.get()
        if place.kind == "_buffers" and (id(place.tensors) in modules or now is not tensor):
            own.copy_(now)
            changed.append(i)
    return changed


def _staying(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of tensors, such as a cast, that leaves them on their device."""

    def change(tensor: Tensor) -> Tensor:
        changed = fn(tensor)
        if changed.device == tensor.device:
            return changed
        return tensor if changed.dtype == tensor.dtype else changed.to(tensor.device)

    return change


def _without_cache(value: Any) -> Any:
    """``None`` for a cache of keys and values, which a forward that runs twice would write to twice.

    Raises:
        ValueError: it has values already.
    """
    if not hasattr(value, "get_seq_length"):
        return value
    if value.get_seq_length():
        raise ValueError(
            "A streamed unit computes its forward twice when there are gradients, and so takes no cache that holds "
            f"{value.get_seq_length()} tokens"
        )
    return None


def _shape_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype on a device, whose values nobody reads: it has one element."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _in_backward() -> bool:
    """Whether autograd runs in this thread, so that a forward is a recomputation."""
    return running_backward() != NO_BACKWARD
