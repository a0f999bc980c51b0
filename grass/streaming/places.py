"""Where a module has its tensors, and how others take their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from grass.kernels.layout import is_dense


class Place(NamedTuple):
    """Where a module has a tensor.

    Attributes:
        module: the module.
        kind: ``"_parameters"`` or ``"_buffers"``.
        name: of the tensor in it.
        others: where modules have the same tensor too.
    """

    module: nn.Module
    kind: str
    name: str
    others: tuple[Place, ...] = ()

    def get(self) -> Tensor:
        """The tensor."""
        tensor: Tensor = vars(self.module)[self.kind][self.name]
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Another tensor in its place, past ``nn.Module``'s checks."""
        vars(self.module)[self.kind][self.name] = tensor
        for other in self.others:
            other.put(tensor)


def tensors_of(module: nn.Module) -> list[Place]:
    """A place of each tensor of a module and those in it, which knows the others."""
    found: dict[int, list[Place]] = {}
    for place in places_of(module):
        found.setdefault(id(place.get()), []).append(place)
    return [first._replace(others=tuple(others)) for first, *others in found.values()]


def places_of(module: nn.Module) -> Iterator[Place]:
    """All places of a module and those in it."""
    for part in module.modules():
        for kind in ("_parameters", "_buffers"):
            tensors: dict[str, Any] = vars(part)[kind]
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield Place(part, kind, name)


def outgoing(tensor: Tensor) -> Tensor:
    """The values of a tensor without gaps between them."""
    tensor = tensor.detach()
    return tensor if is_dense(tensor) else tensor.contiguous()


def staying(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of tensors, such as a cast, that leaves them on their device."""

    def change(tensor: Tensor) -> Tensor:
        changed = fn(tensor)
        if changed.device == tensor.device:
            return changed
        return tensor if changed.dtype == tensor.dtype else changed.to(tensor.device)

    return change
