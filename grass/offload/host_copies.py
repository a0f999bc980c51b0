"""Host copies: what the host keeps of one parameter. The code that steps parameters steps the copy in its place.

A copy receives the gradient from the device, is stepped, and sends back what has changed. Nothing in between knows that
it is a copy, so the result is the resident optimizer's, bit for bit.

====================  =================================  ==================================
parameter             gradient that goes down            values that come up
====================  =================================  ==================================
active rows           ``r + q`` rows                     ``r + q`` rows of the weight
of a whole weight     all of it                          all of it
at full rank          all of it                          all of it
====================  =================================  ==================================

Active rows that are more precise than their weight come up as well: ``r`` rows more. With ``decay="all"`` whole weights
come up. Weights of 8 bits come up as codes, with the scales of these rows.

Half-precision parameters may have a float32 master on the host, which is stepped in their place and rounded. The state
keeps the master under ``"master"``. So a checkpoint has it, and a resumed run continues bit for bit.

Parameters that lie on the host while their module computes on a device (:func:`grass.stream` marks them) are stepped
where they are: their gradient is on the host when ``step`` is called, and nothing travels.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import SyncedRows
from grass.kernels.layout import is_dense
from grass.machine.link import Link
from grass.offload.host_storage import HostStorage, host_like, same_layout, to_host
from grass.offload.progress import Changed, GradientSnapshot, Stage, stamp_of
from grass.parallel.shards import aligned_grad, is_sharded, local
from grass.selection.projector import Projector
from grass.state.master import current
from grass.state.schema import MOMENTS, State
from grass.stepping.optimizer_step import OptimizerStep


class HostCopy:
    """The host's copy of a parameter that is not active rows of a converted layer.

    Attributes:
        stage: how far the last step has come.
        device: the parameter.
        host: its copy, which is stepped.
        layer: the host's copy of a converted layer; here ``None``.
    """

    stage = Stage.ARRIVED
    layer: CompactLayer | None = None
    _departed: Any

    def __init__(self, parameter: Tensor, storage: HostStorage, host: Tensor | None = None) -> None:
        self.device, self._storage = parameter, storage
        self.host: Tensor = nn.Parameter(storage.copy(parameter) if host is None else host, requires_grad=False)
        self._grad = torch.empty(0, device="cpu")
        self._version = self._stamp()

    def is_current(self) -> bool:
        """Whether nothing has changed the parameter since its values last came up."""
        return self._stamp() == self._version

    def begin(self, link: Link, *, decays_all: bool) -> None:
        """Note, while ``optimizer.step`` runs, what goes down: it must not change before :meth:`take` has run.

        Args:
            link: to the parameter's device.
            decays_all: whether the step changes all values of the weight.
        """
        grad = local(aligned_grad(self.device))
        if not is_dense(grad):
            grad = grad.contiguous()
        self._source, self._snapshot = grad, GradientSnapshot(self.device, grad)
        self._mark = link.mark()
        if not same_layout(grad, self._grad):
            self._grad = host_like(grad)

    def depart(self) -> None:
        """Note the parameter: nothing may change it until its values have arrived."""
        self._departed, self.stage = self._stamp(), Stage.QUEUED

    def check_unchanged(self) -> None:
        """Raise :class:`Changed` if something has changed the parameter since :meth:`depart`."""
        if self._has_changed():
            raise Changed(
                f"A parameter of shape {tuple(self.device.shape)} was changed while its step was on its way: call "
                "optimizer.offload.finish() before"
            )

    def bytes_down(self) -> int:
        """Bytes of the gradient."""
        return self._grad.nbytes

    def bytes_up(self) -> int:
        """Bytes of the values that come up."""
        return self._outgoing().nbytes

    def take(self, link: Link) -> None:
        """Copy the gradient down."""
        self._fetch(link)
        self.host.grad = self._storage.shard(self._grad, self.device)

    def step(self, whole: OptimizerStep, group: dict[str, Any], position: int) -> None:
        """Step the copy."""
        whole.advance(group, [(position, self.host)])

    def give(self, link: Link) -> None:
        """Copy the values up."""
        self.host.grad = None
        self.check_unchanged()
        values = local(self.device.detach()).data  # .data: the version counts changes by others
        link.up(self._outgoing(), values, self._mark)

    def arrive(self) -> None:
        """Finish on the device what :meth:`give` has brought, before its first use there.

        If this is interrupted, call it again.
        """
        if self.stage is Stage.ARRIVED:
            return
        if self.stage is not Stage.ARRIVING:
            self.check_unchanged()
            self.stage = Stage.ARRIVING
        self._take_place()
        self._version, self.stage = self._stamp(), Stage.ARRIVED

    def rescue(self, link: Link) -> None:
        """After a fault, bring values up that the host has stepped. A change of the parameter since then is lost."""
        if self.stage is Stage.STEPPED:
            self._departed = self._stamp()
            self.give(link)
            self.stage = Stage.GIVEN
        if self.stage is Stage.GIVEN:
            self._departed = self._stamp()
        if self.stage in (Stage.GIVEN, Stage.ARRIVING):
            self.arrive()

    def _take_place(self) -> None:
        """Put the values where they belong. May be called again."""

    def _outgoing(self) -> Tensor:
        """What :meth:`give` copies."""
        return local(self.host.detach())

    def _fetch(self, link: Link) -> None:
        link.down(self._source, self._grad, self._mark)
        self._snapshot.check(self._grad, link, self._mark)
        del self._source, self._snapshot

    def _has_changed(self) -> bool:
        return bool(self._stamp() != self._departed)

    def _stamp(self) -> tuple[int, int]:
        return stamp_of(self.device)


class LayerCopy(HostCopy):
    """The host's copy of a converted layer."""

    layer: CompactLayer

    def __init__(self, layer: CompactLayer, storage: HostStorage) -> None:
        self.source, self._storage = layer, storage
        self.layer = host_layer(layer, storage)
        self.device, self.host = layer.active, self.layer.active
        self._grad = torch.empty(0, device="cpu")
        self._rows: Tensor | None = None
        self._scale: Tensor | None = None
        self._selected: Tensor | None = None
        self._version = self._stamp()

    def begin(self, link: Link, *, decays_all: bool) -> None:
        """Note the gradient, and the sketch if one was gathered for this step."""
        super().begin(link, decays_all=decays_all)
        self._sends_all = decays_all
        self._sketch = None
        if self.source.sketch is not None:
            self._sketch = self.source.end_sketch()

    def take(self, link: Link) -> None:
        """Copy the gradient and the sketch down."""
        super().take(link)
        if self._sketch is not None and self.layer.sketch is not None:
            self.layer.sketch.grad = to_host(self._sketch)
            self._sketch = None
        self._before = Projector(self.layer.chosen.clone(), None, self.layer.dim)

    def bytes_up(self) -> int:
        """Bytes of the weight's rows, and of active rows that are more precise."""
        layer = self.layer
        weight = layer.stored()
        rows = weight.nbytes if self._sends_all else layer.rows().numel() * weight.element_size()
        scale = layer.scale()
        per_scale = 0 if scale is None else scale.element_size()
        scales = per_scale * (layer.shape[layer.dim] if self._sends_all else layer.chosen.numel())
        return rows + scales + (layer.selected_part(layer.rows()).nbytes if self._is_wider() else 0)

    def give(self, link: Link) -> None:
        """Copy the stepped rows up, and those that the layer trains next."""
        self.host.grad = None
        weight, scale = self.layer.stored(), self.layer.scale()
        self._rows = self._sent(link, weight if self._sends_all else self.layer.take(weight, self._before))
        if scale is not None:
            self._scale = self._sent(link, scale if self._sends_all else scale[self._before.indices])
        if self._is_wider():
            selected = self.source.selected_part(self.source.rows())
            self._selected = torch.empty_like(selected, memory_format=torch.contiguous_format)
            link.up(self.layer.selected_part(self.layer.rows()).contiguous(), self._selected, link.mark())

    def arrive(self) -> None:
        """Write the rows into the weight, and bring the layer to the rows that train next."""
        super().arrive()
        self._rows = self._scale = self._selected = None

    def rescue(self, link: Link) -> None:
        """As for any parameter. A layer that was not stepped is in agreement, although the step has begun."""
        if self.stage is Stage.QUEUED:
            if self.source.stamps() != self._departed[0]:
                self.source.reload()
            self.source.mark_synced()
        super().rescue(link)

    def _take_place(self) -> None:
        source, rows = self.source, self._rows
        assert rows is not None
        device, scale = source.chosen.device, source.scale()
        if self._sends_all:
            source.stored().copy_(rows)
        else:
            source.put(source.stored(), Projector(self._before.indices.to(device), None, source.dim), rows)
        if scale is not None and self._scale is not None:
            scale[... if self._sends_all else self._before.indices.to(device)] = self._scale
        source.chosen.copy_(self.layer.chosen)
        source.reload()
        if self._selected is not None:
            source.selected_part(source.rows()).copy_(self._selected)
        source.synced.note_step()
        source.norms, source.selections = self.layer.norms, self.layer.selections
        if self.layer.sketch is not None and source.sketch is None:
            signs = self.layer.signs
            source.begin_sketch(None if signs is None else signs.to(device))
        source.mark_synced()

    def _sent(self, link: Link, values: Tensor) -> Tensor:
        """Values that have been copied to the device."""
        there = torch.empty_like(values, device=self.device.device)
        link.up(values, there, link.mark())
        return there

    def _is_wider(self) -> bool:
        return bool(self.layer.active.dtype != self.layer.weight.dtype)

    def _stamp(self) -> Any:
        tensors = (self.source.weight, self.source.active) if is_sharded(self.source.weight) else ()
        return self.source.stamps(), [stamp_of(t) for t in tensors], self.source.selections


class MasterCopy(HostCopy):
    """The host's float32 master of a half-precision parameter.

    Attributes:
        host: the master.
    """

    def __init__(self, parameter: Tensor, storage: HostStorage, state: State) -> None:
        super().__init__(parameter, storage, master_of(parameter, storage, state))
        self._values = storage.empty_like(local(parameter.detach()))

    def take(self, link: Link) -> None:
        """Copy the gradient down, in half precision."""
        self._fetch(link)

    def step(self, whole: OptimizerStep, group: dict[str, Any], position: int) -> None:
        """Step the master, and round it."""
        state = whole.states[self.host]
        state.pop("master", None)
        grad = self._storage.shard(self._grad, self.device)
        whole.advance_master(group, position, self.host, grad, self._values)
        state["master"] = self.host.detach()

    def _outgoing(self) -> Tensor:
        """The rounded values."""
        return self._values


class InPlace(HostCopy):
    """Stands for a marked parameter in a step. The values and the layer are the model's own.

    Nothing may change them from ``optimizer.step`` until the step has ended. A change before the host begins with the
    parameter is seen, and one after it has ended; one in between is not.

    Args:
        parameter: the marked parameter.
        storage: where its master lies.
        layer: the converted layer whose active rows it has.
        state: its state if it has a float32 master there, which is stepped in its place.
    """

    def __init__(
        self, parameter: Tensor, storage: HostStorage, layer: CompactLayer | None, state: State | None = None
    ) -> None:
        own = parameter.detach() if state is None else master_of(parameter, storage, state)
        super().__init__(parameter, storage, own)
        self.layer, self._state = layer, state

    def begin(self, link: Link, *, decays_all: bool) -> None:
        """Note the gradient and the sketch, where the loop's ``zero_grad()`` cannot drop them."""
        assert self.device.grad is not None
        self._gradient: Tensor | None = self.device.grad
        self._snapshot = GradientSnapshot(self.device, self.device.grad)
        if self.layer is not None:
            self.layer.hold_sketch()

    def bytes_down(self) -> int:
        """Nothing travels."""
        return 0

    def bytes_up(self) -> int:
        """Nothing travels."""
        return 0

    def take(self, link: Link) -> None:
        """The gradient is here."""

    def step(self, whole: OptimizerStep, group: dict[str, Any], position: int) -> None:
        """Step the parameter itself.

        Raises:
            RuntimeError: the gradient or the parameter was changed in place since ``optimizer.step``.
        """
        self.check_unchanged()
        grad, self._gradient = self._gradient, None
        assert grad is not None
        self._snapshot.check(grad)
        if self._state is None:
            self.host.grad = grad
            whole.advance(group, [(position, self.host)])
            self.host.grad = None
        else:
            self._state.pop("master", None)
            whole.advance_master(group, position, self.host, grad, self.device.detach().data)
            self._state["master"] = self.host.detach()
        whole.background.finish()
        if self.layer is not None:
            self.layer.held_sketch = None
        self._departed = self._seen()

    def give(self, link: Link) -> None:
        """The values are here."""

    def depart(self) -> None:
        """Nothing is on its way, but nothing may change."""
        self._departed, self.stage = self._seen(), Stage.QUEUED

    def arrive(self) -> None:
        """Note the parameter as it is after the step, unless a cast has moved its values since."""
        if self.stage is not Stage.ARRIVED:
            self.check_unchanged()
            if (now := self._stamp())[1] == self._version[1]:
                self._version = now
        self.stage = Stage.ARRIVED

    def rescue(self, link: Link) -> None:
        """The values are here."""

    def _has_changed(self) -> bool:
        """Whether something has changed values where they are; a cast moves them."""
        pairs = zip(self._departed, self._seen(), strict=True)
        return any(then[1] == now[1] and then[0] != now[0] for then, now in pairs)

    def _seen(self) -> list[tuple[int, int]]:
        tensors = [self.device] if self.layer is None else [self.device, self.layer.own_weight()]
        return [stamp_of(tensor) for tensor in tensors]


def master_of(parameter: Tensor, storage: HostStorage, state: State) -> Tensor:
    """The float32 master of a parameter: that of its state where it still rounds to the parameter's values.

    Moments at full rank that were saved in half precision become float32 too.
    """
    for key in MOMENTS:
        if key in state and "indices" not in state:
            state[key] = state[key].to(torch.float32)
    values = to_host(local(parameter.detach()))
    master, saved = values.float(), state.get("master")
    if saved is not None:
        master = current(values, local(saved))
    return storage.shard(storage.copy(master), parameter)


def host_layer(layer: CompactLayer, storage: HostStorage) -> CompactLayer:
    """A converted layer with the same values in host memory, without hooks and not registered."""
    plain: Any = next(kind for kind in type(layer).__mro__ if not hasattr(kind, "unshard"))  # beneath what FSDP2 adds
    copy = plain.__new__(plain)
    state = dict(vars(layer))
    for name, value in state.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            state[name] = OrderedDict()
    parameters = {"weight": layer.weight, "active": layer.active}
    state["_parameters"] = {
        name: nn.Parameter(storage.copy(p), requires_grad=p.requires_grad) for name, p in parameters.items()
    }
    state["_parameters"]["bias"] = None
    state["_buffers"] = {name: None if b is None else to_host(b) for name, b in layer._buffers.items()}
    state |= {"synced": SyncedRows(), "listeners": ()}
    vars(copy).update(state)
    if layer.sketch is not None:
        copy.begin_sketch(None if layer.signs is None else layer.signs.cpu())
    copy.mark_synced()
    return copy  # type: ignore[no-any-return]
