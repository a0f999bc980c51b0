"""The peak of a training step in closed form: when it is reached and of what it consists."""

from __future__ import annotations

from dataclasses import dataclass

from grass.memory.activations import (
    end_activations,
    layer_activations,
    layer_input,
    layer_temporaries,
    loss_memory,
)
from grass.memory.architecture import Architecture
from grass.memory.methods import METHODS, Holdings
from grass.memory.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of one way of training, each category at its own largest.

    Attributes:
        weights: of the model.
        active_rows: Grass's selected rows, LoRA's adapters.
        gradients: after backward.
        moments: optimizer state on the device.
        bank: moments in host memory, not part of the peak.
        activations: what forward saves; under checkpointing the layers' inputs and one layer's recomputation.
        loss: logits and gradients with respect to them.
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
    activations: int
    loss: int
    workspace: int
    peak: int
    peak_at: str
    slack: int

    @property
    def total(self) -> int:
        """Bytes the device must have."""
        return self.peak + self.slack


def plan(method: str, model: Architecture, setting: Setting) -> Plan:
    """Plan the training of ``model`` by one of :data:`grass.memory.METHODS`.

    The peak is that of a step in which Grass gathers its sketch: every ``update_interval``-th step, and the largest.

    Raises:
        ValueError: the method is unknown, or the setting does not suit the model.
    """
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}; available: {', '.join(METHODS)}")
    setting.check(model)
    held = METHODS[method](model, setting)
    moments = {**peaks(held, model, setting, refresh=False), **peaks(held, model, setting, refresh=True)}
    peak_at = max(moments, key=lambda moment: moments[moment])
    layer = layer_activations(model, setting, max(held.layer_inputs, held.refresh_inputs))
    kept = layer_input(model, setting) * model.layers + layer if setting.checkpointing else layer * model.layers
    return Plan(
        weights=held.weights,
        active_rows=held.active_rows,
        gradients=model.layers * held.layer_gradients + held.end_gradients,
        moments=held.moments,
        bank=held.bank,
        activations=kept + end_activations(model, setting),
        loss=loss_memory(model, setting, head_trains=held.end_gradients > 0),
        workspace=max(held.layer_workspace + layer_temporaries(model, setting), held.step_workspace)
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
    activations = layer_activations(model, setting, held.refresh_inputs if refresh else held.layer_inputs)
    saved = layer_input(model, setting) if setting.checkpointing else activations
    in_layer = (activations if setting.checkpointing else 0) + layer_temporaries(model, setting) + held.layer_workspace
    ends, head = end_activations(model, setting), model.embedding * setting.dtype.itemsize if held.end_gradients else 0
    gradients = layers * layer_gradients + held.end_gradients
    untied = head if held.end_gradients and not model.tied else 0
    embedding = 2 * layer_input(model, setting) + (2 * head if model.tied else 0)
    before_first = gradients - layer_gradients - untied
    return {
        f"loss{name}": static + layers * saved + ends + loss_memory(model, setting, head_trains=head > 0),
        f"backward of the last layer{name}": static + layers * saved + head + in_layer,
        f"backward of the first layer{name}": static + saved + before_first + in_layer,
        f"backward of the embedding{name}": static + gradients + embedding,
        f"optimizer step{name}": static + gradients + held.step_workspace,
    }
