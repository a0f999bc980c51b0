"""The peak of a training step: when it is reached and of what it consists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from grass.memory.activations import loss_memory
from grass.memory.architecture import Architecture
from grass.memory.methods import METHODS, OFFLOADABLE, Holdings, Host, offloaded
from grass.memory.offloading import bytes_in_files
from grass.memory.setting import Setting
from grass.memory.sharding import SHARDABLE, sharded, sharded_peaks
from grass.memory.streaming import streamed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of one way of training, each category at its own largest.

    Attributes:
        weights: of the model.
        active_rows: Grass's selected and explored rows, LoRA's adapters.
        gradients: after backward.
        moments: optimizer state on the device.
        bank: moments in host memory, not part of the peak.
        host: what offload keeps on the host beside the bank, not part of the peak either.
        files: bytes of bank and ``host`` that lie in files, not in memory.
        activations: what forward saves; under checkpointing the layers' inputs and one layer's recomputation.
        loss: logits and gradients with respect to them.
        gathered: whole blocks, the ends, and gradients on their way to the devices that keep them, where devices divide
            the model.
        workspace: temporaries of backward through one layer, or of the optimizer's step if these are larger, and the
            sketch of a refresh.
        peak: the most that exists at a time. Not the sum of the categories: gradients grow as activations shrink.
        peak_at: the moment of the peak.
        slack: what the allocator is taken to need beyond it.
    """

    weights: int
    active_rows: int
    gradients: int
    moments: int
    bank: int
    host: Host
    files: int
    activations: int
    loss: int
    gathered: int
    workspace: int
    peak: int
    peak_at: str
    slack: int

    @property
    def total(self) -> int:
        """Bytes the device must have."""
        return self.peak + self.slack

    @property
    def on_host(self) -> int:
        """Bytes of host memory."""
        return self.bank + sum(self.host) - self.files

    def fits(self, gpu: int, host: int | None = None) -> bool:
        """Whether a device and a host of so many bytes are enough; ``None`` is any."""
        return self.total <= gpu and (host is None or self.on_host <= host)


def planned_methods(setting: Setting) -> Collection[str]:
    """The methods that have a plan: all of :data:`grass.memory.METHODS`, fewer where devices divide the model."""
    return SHARDABLE if setting.shards > 1 else METHODS


def plan(method: str, model: Architecture, setting: Setting) -> Plan:
    """Plan the training of ``model`` by one of :data:`grass.memory.METHODS`.

    With a rule that reads norms, the peak is that of a step in which Grass gathers its sketch: every
    ``update_interval``-th step, and the largest.

    Raises:
        ValueError: the method is unknown, or has no plan for several devices, or the setting does not suit the model.
    """
    if method not in (methods := planned_methods(setting)):
        raise ValueError(f"Unknown method {method!r}; available: {', '.join(methods)}")
    setting.check(model)
    held = METHODS[method](model, setting)
    files = 0
    if setting.offload and method in OFFLOADABLE:
        held = offloaded(method, held, model, setting)
        files = bytes_in_files(method, model, setting) if setting.files else 0
        if setting.stream:
            held = streamed(held, model, setting)
    if setting.shards > 1:
        held = sharded(method, held, model, setting)
        moments = sharded_peaks(held, model, setting)
    else:
        moments = {**peaks(held, model, setting, refresh=False), **peaks(held, model, setting, refresh=True)}
    peak_at = max(moments, key=lambda moment: moments[moment])
    layer = max(held.layer_saved, held.refresh_saved)
    kept = held.traced.block_input * held.inputs_of(model) + layer if setting.checkpointing else layer * model.layers
    return Plan(
        weights=held.weights,
        active_rows=held.active_rows,
        gradients=0 if held.in_backward else model.layers * held.layer_gradients + held.end_gradients,
        moments=held.moments,
        bank=held.bank,
        host=held.host,
        files=files,
        activations=round(kept + held.traced.ends),
        loss=round(loss_memory(model, setting, held.traced.loss, head_trains=held.end_gradients > 0)),
        gathered=0 if held.gathered is None else held.gathered.most(model.layers),
        workspace=round(max(held.layer_workspace + held.traced.temporaries, held.step_workspace))
        + model.layers * (held.refresh_layer + held.refresh_layer_gradients),
        peak=moments[peak_at],
        peak_at=peak_at,
        slack=round(setting.slack * moments[peak_at]),
    )


def peaks(held: Holdings, model: Architecture, setting: Setting, *, refresh: bool) -> dict[str, int]:
    """Bytes at the moments that can be a step's largest; ``refresh``: in a step that gathers a sketch.

    Between two neighbouring moments the sum is linear in the number of layers done, so that no other can be larger.
    """
    layers, name = model.layers, " of a refresh step" if refresh else ""
    static = held.weights + held.active_rows + held.moments + (layers * held.refresh_layer if refresh else 0)
    layer_gradients = held.layer_gradients + (held.refresh_layer_gradients if refresh else 0)
    saved, in_layer = held.in_block(setting, refresh=refresh)
    every = saved * held.inputs_of(model)
    ends, head = held.traced.ends, model.head * setting.dtype.itemsize if held.end_gradients else 0
    gradients = layers * layer_gradients + held.end_gradients
    if held.in_backward:
        gradients = max(layer_gradients, head)
    untied = head if held.end_gradients and not model.tied else 0
    embedding = 2 * held.traced.block_input + (2 * head if model.tied else 0)
    before_first = gradients - layer_gradients - untied
    loss = loss_memory(model, setting, held.traced.loss, head_trains=head > 0)
    found = {
        f"loss{name}": static + every + ends + loss,
        f"backward of the last layer{name}": static + every + head + in_layer,
        f"backward of the first layer{name}": static + saved + before_first + in_layer,
        f"backward of the embedding{name}": static + gradients + embedding,
        f"optimizer step{name}": static + gradients + held.step_workspace,
    }
    return {moment: round(size) for moment, size in found.items()}
