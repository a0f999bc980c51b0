"""A unit on the host: its tensors, what has changed in them, and which of them travel to the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import LastChange
from grass.every_optimizer import after_every_step
from grass.kernels.layout import is_dense
from grass.offload.host_storage import SMALLEST, HostStorage, mark_on_host, unmark_on_host, wait_for_step
from grass.offload.progress import stamp_of

ALIGNMENT = 512
"""Bytes that the place of a tensor on the device is a multiple of."""


class Place(NamedTuple):
    """Where a module has a tensor. It does not keep the module in memory.

    Attributes:
        tensors: the module's dictionary of parameters or of buffers.
        kind: ``"_parameters"`` or ``"_buffers"``.
        name: of the tensor in it.
        others: where modules have the same tensor too.
    """

    tensors: dict[str, Tensor]
    kind: str
    name: str
    others: tuple[Place, ...] = ()

    def get(self) -> Tensor:
        """The tensor."""
        return self.tensors[self.name]

    def put(self, tensor: Tensor) -> None:
        """Another tensor in its place, past ``nn.Module``'s checks."""
        self.tensors[self.name] = tensor
        for other in self.others:
            other.put(tensor)


class Version(NamedTuple):
    """What a unit's tensors were at a time.

    Attributes:
        steps: how often optimizers that have tensors of the unit had stepped. A fused optimizer does not count its
            changes in a tensor's version.
        stamps: of the tensors that travel; they differ after any other change that PyTorch can see.
        written: of each converted layer how often a step had written rows into its weight.
    """

    steps: int
    stamps: list[tuple[int, int]]
    written: list[int]


class Change(NamedTuple):
    """How a tensor differs from an earlier version.

    Attributes:
        number: of the tensor among those that travel.
        rows: the rows that differ; ``None``: perhaps all.
        layer: the converted layer whose weight it is, if only rows differ.
    """

    number: int
    rows: Tensor | None = None
    layer: CompactLayer | None = None


def count_steps(units: list[HostBlock]) -> None:
    """Let each unit count the steps of the optimizers that have tensors of it, as long as there are units."""
    known = [weakref.ref(unit) for unit in units]

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for reference in known:
            if (unit := reference()) is not None and not params.isdisjoint(unit.ids()):
                unit.steps += 1

    weakref.finalize(units[0], after_every_step(stepped)).atexit = False


class HostBlock:
    """A unit as it lies on the host.

    Active rows of converted layers do not travel: the weight has their values already. Only their shape is on the
    device, where their gradient is computed.

    The module refers to this, and this does not keep the module: memory is free as soon as the model is dropped.

    Args:
        name: of the unit in the model.
        module: the unit.
        resident: the ``id`` of the tensors that stay on the device, because other modules use them too.

    Attributes:
        places: of the tensors that travel.
        active: of the active rows.
        steps: of optimizers that have tensors of it, since :func:`count_steps`.
    """

    def __init__(self, name: str, module: nn.Module, resident: set[int]) -> None:
        self.name, self._module, self.steps = name, weakref.ref(module), 0
        self._layers = [weakref.ref(part) for part in module.modules() if isinstance(part, CompactLayer)]
        rows = {id(layer.active) for layer in self.layers}
        every = [place for place in _tensors_of(module) if id(place.get()) not in resident]
        self.places = [place for place in every if id(place.get()) not in rows]
        self.active = [place for place in every if id(place.get()) in rows]
        all_places = ((number, at) for number, place in enumerate(self.places) for at in (place, *place.others))
        numbers = {(id(at.tensors), at.name): number for number, at in all_places}
        self._mapped: set[int] = set()
        self._weights = {
            numbers[id(home), "weight"]: i
            for i, layer in enumerate(self.layers)
            for home in (layer._parameters, layer._buffers)
            if "weight" in home
        }
        self._parameters = _count(module)
        self._lent: list[tuple[Place, Tensor]] = []
        self._lent_sketches: list[tuple[CompactLayer, Tensor | None, Tensor | None]] = []

    @property
    def module(self) -> nn.Module:
        """The unit.

        Raises:
            ReferenceError: the model was dropped.
        """
        if (module := self._module()) is None:
            raise ReferenceError(f"The unit {self.name!r} is gone: nothing refers to the model any more")
        return module

    @property
    def lives(self) -> bool:
        """Whether the model is still there."""
        return self._module() is not None

    @property
    def layers(self) -> list[CompactLayer]:
        """The converted layers."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def ids(self) -> Iterator[int]:
        """The ``id`` of each of its tensors, also while others are in their places."""
        lent = (own for _, own in self._lent)
        return map(id, lent if self._lent else (place.get() for place in (*self.places, *self.active)))

    def lend(self) -> list[tuple[Place, Tensor]]:
        """Note the tensors of the modules, in whose places others are put until :meth:`take_back`. Returns them."""
        self._lent_sketches = [(layer, layer.sketch, layer.signs) for layer in self.layers if layer.sketch is not None]
        self._lent = [(place, place.get()) for place in (*self.places, *self.active)]
        return self._lent

    def take_back(self) -> None:
        """Put the unit's own tensors into their places. May be called again if it was interrupted."""
        for place, own in self._lent:
            place.put(own)
        for layer, sketch, signs in self._lent_sketches:
            layer.sketch, layer.signs = sketch, signs
        self._lent, self._lent_sketches = [], []

    def trained(self) -> Iterator[nn.Parameter]:
        """The parameters that travel or are stood in for."""
        for place in (*self.places, *self.active):
            if isinstance(tensor := place.get(), nn.Parameter):
                yield tensor

    def mark(self) -> None:
        """Let the optimizer step the parameters where they lie (:mod:`grass.offload.host_storage`)."""
        for p in self.trained():
            mark_on_host(p)
        for layer in self.layers:
            layer.listeners = (*layer.listeners, LastChange(moves_weight=True))

    def unmark(self) -> None:
        """The opposite of :meth:`mark`."""
        for p in self.trained():
            unmark_on_host(p)
        for layer in self.layers:
            layer.sync()
            layer.listeners = tuple(each for each in layer.listeners if not isinstance(each, LastChange))
            layer.synced.late = False

    def put_into_files(self, storage: HostStorage) -> None:
        """Move frozen tensors to memory-mapped files. Steps leave them as they are where no rows are explored."""
        for tensor in self.frozen():
            tensor.data = storage.copy(tensor)
            self._mapped.add(id(tensor))
        for layer in self.layers:
            if id(layer.weight) in self._mapped and not layer.reach and layer.scale() is None:
                layer.synced.late = True
                layer.mark_synced()

    def frozen(self) -> list[Tensor]:
        """The tensors that travel and do not train, large enough for files."""
        every = (place.get() for place in self.places if place.kind == "_parameters")
        return [tensor for tensor in every if not tensor.requires_grad and tensor.nbytes >= SMALLEST]

    def wait(self) -> None:
        """Wait until the steps of the parameters that are on their way have ended."""
        for p in self.trained():
            wait_for_step(p)

    def sync(self, *, probe: bool) -> None:
        """Make weights and active rows agree where one was changed by hand."""
        for layer in self.layers:
            layer.follow(probe=probe)

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters were added or removed."""
        if (now := _count(self.module)) != self._parameters:
            raise RuntimeError(
                f"The unit {self.name!r} had {self._parameters} parameters at grass.stream() and has {now} now: "
                "call what changes modules, such as grass.compact(), before"
            )

    def version(self) -> Version:
        """What the tensors are now."""
        changes = [LastChange.of(layer) for layer in self.layers]
        numbers = [0 if change is None else change.number for change in changes]
        return Version(self.steps, [stamp_of(place.get()) for place in self.places], numbers)

    def changes(self, then: Version | None, now: Version) -> list[Change]:
        """What differs between two versions, the second of which is that of now. ``None``: everything does."""
        every = (
            Change(number) if then is None else self._change(number, then, now) for number in range(len(self.places))
        )
        return [part for change in every if change is not None for part in self._with_late_rows(change)]

    def _with_late_rows(self, change: Change) -> Iterator[Change]:
        """A change, and the active rows that a whole weight lacks."""
        yield change
        if change.rows is None and (i := self._weights.get(change.number)) is not None and self.layers[i].synced.late:
            yield Change(change.number, self.layers[i].chosen.clone(), self.layers[i])

    def _change(self, number: int, then: Version, now: Version) -> Change | None:
        same = then.stamps[number] == now.stamps[number]
        if number not in self._weights:
            return None if same and then.steps == now.steps else Change(number)
        i = self._weights[number]
        if now.written[i] == then.written[i]:
            return None if same else Change(number)
        layer, known = self.layers[i], (then.stamps[number], now.stamps[number])
        last, once = LastChange.of(layer), now.written[i] == then.written[i] + 1
        if once and last is not None and last.rows is not None and last.spans(*known):
            return Change(number, last.rows, layer)
        return Change(number)

    def room_for_rows(self, device: torch.device, *, late: bool) -> dict[int, Tensor]:
        """Empty tensors on a device for the active rows of each weight, by its number among those that travel.

        Args:
            device: the device.
            late: only of weights into which steps do not write.
        """
        room = {}
        with torch.inference_mode(False):
            for number, i in self._weights.items():
                if late and not self.layers[i].synced.late:
                    continue
                layer, shape = self.layers[i], list(self.layers[i].shape)
                shape[layer.dim] = layer.chosen.numel()
                room[number] = torch.empty(shape, dtype=layer.weight.dtype, device=device)
        return room

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(place.get().nbytes for place in self.places)

    def pin(self) -> None:
        """Move the tensors into one piece of pinned memory, from which a GPU reads without another copy.

        Those in files stay there.
        """
        tensors = [tensor for tensor in self._travelling() if id(tensor) not in self._mapped]
        slab = _views(torch.empty(_room(tensors), dtype=torch.uint8, device="cpu", pin_memory=True), tensors)
        for tensor, view in zip(tensors, slab, strict=True):
            tensor.data = view.copy_(tensor.detach())

    def room_on(self, device: torch.device) -> list[Tensor]:
        """Empty tensors on a device for those that travel, in one piece of memory."""
        with torch.inference_mode(False):
            flat = torch.empty(_room(self._travelling()), dtype=torch.uint8, device=device)
            return list(_views(flat, self._travelling()))

    def _travelling(self) -> list[Tensor]:
        return [place.get() for place in self.places]


def outgoing(tensor: Tensor) -> Tensor:
    """The values of a tensor without gaps between them."""
    tensor = tensor.detach()
    return tensor if is_dense(tensor) else tensor.contiguous()


def _tensors_of(module: nn.Module) -> list[Place]:
    """A place of each tensor of a module and those in it, which knows the others."""
    found: dict[int, list[Place]] = {}
    for place in _places_of(module):
        found.setdefault(id(place.get()), []).append(place)
    return [first._replace(others=tuple(others)) for first, *others in found.values()]


def _places_of(module: nn.Module) -> Iterator[Place]:
    """All places of a module and those in it."""
    for part in module.modules():
        for kind in ("_parameters", "_buffers"):
            tensors: dict[str, Any] = vars(part)[kind]
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield Place(tensors, kind, name)


def _count(module: nn.Module) -> int:
    return sum(p is not None for part in module.modules() for p in part._parameters.values())


def _views(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Uninitialised tensors like these, one after another in ``flat``."""
    start = 0
    for tensor in tensors:
        like = torch.empty_like(outgoing(tensor), device="meta", memory_format=torch.preserve_format)
        values = flat[start : start + tensor.nbytes].view(tensor.dtype)
        yield values.as_strided(tensor.shape, like.stride()).data  # a version of its own
        start += _aligned(tensor.nbytes)


def _room(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
