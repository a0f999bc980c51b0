"""``grass.stream``: train a model that is larger than the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from grass.device import accelerator, free_bytes, has_streams, is_available
from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_storage import HostStorage
from grass.offload.options import Offload
from grass.parallel.shards import is_sharded
from grass.private_names import has_compiled_call, keeps_identity
from grass.streaming.activations import HostActivations
from grass.streaming.block_forward import BlockForward, StreamedBlock, plain_class, streamed_class
from grass.streaming.device_block import Counts
from grass.streaming.gradients import HostGradients
from grass.streaming.host_block import HostBlock
from grass.streaming.micro_batches import MicroBatches
from grass.streaming.prefetch import AHEAD, Prefetcher
from grass.streaming.units import find_units

SPARE = 0.5
"""Share of the device's free memory that ``cache="auto"`` takes for units."""


def stream(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    cache: int | str = 0,
    units: Sequence[str] | None = None,
    offload_activations: bool = False,
    offload: Offload | str | None = None,
) -> Stream:
    """Keep a model's units on the host, and bring each to the device while it computes.

    The model must be on the host. It stays a model like any other: the training loop, the Trainer, ``generate()``,
    ``state_dict()`` and ``save_pretrained()`` need no change. What lies outside of the units (embeddings, head), and
    what units share with other modules, moves to the device. Each unit is checkpointed: backward brings it to the
    device again and computes its forward again. Results are those of a resident model that is checkpointed, bit for
    bit.

    The host holds all values. So an optimizer steps the units' parameters on the host; :class:`grass.GrassAdamW` with
    ``offload="cpu"`` does it while the next forward runs. Frozen weights travel to the device, and gradients of the
    trained parameters travel back, during backward.

    Args:
        model: a module on the CPU. Call :func:`grass.compact` before.
        device: where the units compute; ``None``: this machine's accelerator.
        cache: bytes of units that stay on the device, beside those that are on their way. ``"auto"``: half of the
            memory that is free now. Of their converted weights only the rows come again that a step has written; other
            parameters come again after each step.
        units: names of modules, or of lists of modules whose items are units. Default: the outermost lists that hold
            at least an eighth of the parameters each.
        offload_activations: keep the inputs of units on the host between forward and backward.
        offload: of its fields ``path`` and ``deadline`` matter here; the optimizer may get the same one. ``path`` is a
            directory, on a fast disk, for memory-mapped files that the frozen tensors of units lie in; they leave host
            memory. A step writes there only where rows are explored (``explore=0``: none are), where weights are
            int8 codes, or where all rows decay; otherwise a refresh does, and whatever reads the weights on the host,
            such as ``state_dict()``. The files go with the stream.

    Returns:
        A handle with counts of what was copied, and :meth:`Stream.close`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model is not on the CPU or is streamed already, no units are found, a name in ``units`` is
            wrong, or a number is out of range.
        OSError: the disk of ``offload.path`` has not enough space; nothing was written.
        MemoryError: the host has not enough memory for the gradients.
        RuntimeError: while training: a copy has failed or takes longer than the deadline.
    """
    _check(model, cache, offload_activations)
    options = Offload.of(offload) or Offload()
    device, storage = _device(device), HostStorage(options.path)
    found = find_units(model, units)
    shared = _shared(model, list(found.values()))
    if compiled := [name for name, unit in found.items() if has_compiled_call(unit)]:
        raise ValueError(f"{compiled[0]!r} is compiled: call its compile() after grass.stream()")
    hosts = [HostBlock(name, module, shared) for name, module in found.items()]
    link = Link(device, bytes_per_second=options._bytes_per_second)
    executor = Executor(("up", "down"), deadline=options.deadline)
    _check_room(hosts, storage, in_files=options.path is not None)
    _move_others(model, hosts, link.device)
    if cache == "auto":
        cache = int(SPARE * free_bytes(link.device)) if has_streams(link.device) else 0
    assert isinstance(cache, int)
    prefetcher, gradients = Prefetcher(hosts, link, executor, cache), HostGradients(link, executor)
    micro_batches = MicroBatches()
    activations = HostActivations(link, executor) if offload_activations else None
    for number, unit in enumerate(hosts):
        if options.path is not None:
            unit.put_into_files(storage)
        if has_streams(link.device):
            unit.pin()
        unit.mark()
        module: Any = unit.module
        module._block_forward = BlockForward(number, unit, prefetcher, gradients, activations, micro_batches)
        module.__class__ = streamed_class(type(module))  # type: ignore[arg-type]  # mypy: type[Any] is no Hashable
    return Stream(hosts, prefetcher, micro_batches)


class Stream:
    """A streamed model's units and what they have copied.

    Attributes:
        units: on the host, in order.
        counts: loads, bytes and seconds so far (:class:`grass.streaming.device_block.Counts`).
    """

    def __init__(self, units: list[HostBlock], prefetcher: Prefetcher, micro_batches: MicroBatches) -> None:
        self.units, self._prefetcher, self._micro_batches = units, prefetcher, micro_batches

    def step(self, microbatches: Sequence[Any], loss_fn: Callable[[Any], Tensor]) -> Tensor:
        """Forward and backward of several micro-batches, all of them through one unit before the next one comes.

        Units are copied as often as for one micro-batch. Gradients add up as those of
        ``for batch in microbatches: loss_fn(batch).backward()``, bit for bit, where nothing is drawn at random: dropout
        draws in another order. Then call ``optimizer.step()``.

        Args:
            microbatches: what ``loss_fn`` takes. Their inputs to units are kept at the same time.
            loss_fn: runs the model on one of them and returns its share of the loss, such as the sum over its tokens
                divided by the tokens of all. It runs in a thread of its own; only one runs at a time.

        Returns:
            The sum of the losses, detached.

        Raises:
            TypeError: the micro-batches are no list, ``loss_fn`` is no function or returns no tensor.
            ValueError: there are no micro-batches, or ``loss_fn`` returns no scalar or one without a gradient.
            RuntimeError: gradients are disabled, the stream is closed, or ``loss_fn`` calls this method.
        """
        if not isinstance(microbatches, (list, tuple)):
            raise TypeError(f"microbatches must be a list or a tuple, got {type(microbatches).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
        if not microbatches:
            raise ValueError(f"Invalid {microbatches=}: must be at least one")
        if not torch.is_grad_enabled():
            raise RuntimeError("stream.step runs backward, and gradients are disabled here")
        if not isinstance(self.units[0].module, StreamedBlock):
            raise RuntimeError("The stream is closed")
        losses = self._micro_batches.run(microbatches, loss_fn, self._prefetcher.device)
        return torch.stack(losses).sum()

    @property
    def counts(self) -> Counts:
        """What was copied so far."""
        return self._prefetcher.counts

    def close(self) -> None:
        """Make the units ordinary modules again. They stay on the host."""
        with suppress(RuntimeError):  # a copy has failed before
            self._prefetcher.rest()
        self._prefetcher.clear()
        for unit in self.units:
            unit.wait()
            if not unit.lives:
                continue
            module: Any = unit.module
            if not isinstance(module, StreamedBlock):
                continue
            module.__class__ = plain_class(type(module))
            for name in ("_block_forward", "_computing"):
                vars(module).pop(name, None)
            unit.unmark()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied model is not streamed: the handle that it holds becomes ``None``."""
        return type(None), ()

    def __repr__(self) -> str:
        counts, size = self.counts, sum(unit.nbytes for unit in self.units)
        on_device = min(AHEAD + 1, len(self.units))
        text = (
            f"Units: {len(self.units)} of {size / 1e9:.3g} GB in all, at most {on_device} on {self._prefetcher.device} "
            f"beside the cache. Loads: {counts.loads}, {counts.bytes / 1e9:.3g} GB"
        )
        return f"{text}, {counts.hidden:.0%} of their time hidden" if counts.copying else text


def _check(model: nn.Module, cache: Any, offload_activations: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if any(isinstance(part, StreamedBlock) for part in model.modules()):
        raise ValueError("The model is streamed already")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError("A streamed model computes on one device: use FSDP2's CPUOffloadPolicy for several")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_sharded(tensor):
            raise ValueError(f"{name!r} is a DTensor: a streamed model computes on one device, with whole weights")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name!r} is on {tensor.device}: build the model on the CPU, where streamed units stay")
    if isinstance(cache, bool) or not isinstance(cache, (int, str)):
        raise TypeError(f"Invalid {cache=}: must be a number of bytes or 'auto'")
    if cache != "auto" and (isinstance(cache, str) or cache < 0):
        raise ValueError(f"Invalid {cache=}: must be a number of bytes >= 0 or 'auto'")
    if not isinstance(offload_activations, bool):
        raise TypeError(f"Invalid {offload_activations=}: must be a bool")


def _device(device: Any) -> torch.device:
    """The device, if it is there."""
    if device is None and (device := accelerator()).type == "cpu":
        raise ValueError("Invalid device=None: PyTorch finds no accelerator here; device='cpu' streams to the CPU")
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"Invalid {device=}: must be a torch.device or its name")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"Invalid {device=}: must be 'cuda', 'cuda:1', ... or 'cpu'") from error
    if has_streams(found) and not is_available(found):
        raise ValueError(f"Invalid device={str(found)!r}: PyTorch finds no such device here")
    return found


def _check_room(units: list[HostBlock], storage: HostStorage, *, in_files: bool) -> None:
    """Check that gradients fit into host memory, and frozen tensors into files."""
    trained = {id(p): p.nbytes for unit in units for p in unit.trained() if p.requires_grad}
    HostStorage(None).check_room(sum(trained.values()), "the gradient of a streamed model")
    if in_files:
        storage.check_room(sum(tensor.nbytes for unit in units for tensor in unit.frozen()), "streamed weights")


def _shared(model: nn.Module, units: list[nn.Module]) -> set[int]:
    """The ``id`` of tensors that are in more than one unit, or in a unit and outside of all."""
    inside = [{id(t) for t in (*unit.parameters(), *unit.buffers())} for unit in units]
    of_units = {part for unit in units for part in unit.modules()}
    outside = {
        id(tensor)
        for part in model.modules()
        if part not in of_units
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }
    seen, shared = set[int](), set[int]()
    for ids in (*inside, outside):
        shared |= ids & seen
        seen |= ids
    return shared


def _move_others(model: nn.Module, units: list[HostBlock], device: torch.device) -> None:
    """Move all tensors to the device that do not travel."""
    staying: set[int] = {id(place.get()) for unit in units for place in (*unit.places, *unit.active)}

    def move(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in staying else tensor.to(device)

    if not keeps_identity(torch.empty(0, device="cpu"), torch.empty(0, device=device)):
        for p in model.parameters():  # _apply would make new ones, and the optimizer would step the old ones
            if id(p) not in staying:
                moved = nn.Parameter(p.detach().to(device), p.requires_grad)
                swap_tensors(p, moved)  # type: ignore[no-untyped-call]
    model._apply(move)  # type: ignore[no-untyped-call]
