"""What a device holds of a model that ``fully_shard`` divides, block by block, and what it gathers.

A block is gathered for its forward and backward, the next one while it computes. The parameters outside the blocks stay
gathered from the first forward to the end of backward: they are the root's, which FSDP2 does not reshard in between.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from grass.memory.activations import loss_memory
from grass.memory.architecture import Architecture
from grass.memory.methods import Gathered, Holdings, active_index_bytes, active_sizes, index_bytes
from grass.memory.setting import Setting

SHARDABLE = ("AdamW", "AdamW float32", "Grass dense", "Grass")
"""Methods of which there is a plan."""


def sharded(method: str, held: Holdings, model: Architecture, setting: Setting) -> Holdings:
    """What one of ``setting.shards`` devices holds, where ``held`` is what one alone would.

    Indices and step counts of rows are whole on every device. *AdamW float32* has float32 parameters, whose masters
    they are, and gathers them in ``dtype`` (``MixedPrecisionPolicy(param_dtype=...)``).
    """
    n, e = setting.shards, setting.dtype.itemsize
    rows = model.layers * active_index_bytes(held, model, setting)
    counts = _count_bytes(model, setting) if method.startswith("Grass") else 0
    block = (held.weights + held.active_rows - rows - model.ends * e) // model.layers
    gathered = Gathered(block, model.ends * e, held.layer_gradients, held.end_gradients)
    if method == "AdamW float32":
        held = replace(
            held,
            weights=4 * model.parameters,
            moments=8 * model.parameters,
            layer_gradients=4 * held.layer_gradients // e,
            end_gradients=4 * held.end_gradients // e,
        )
    return replace(
        held,
        weights=ceil(held.weights / n),
        active_rows=ceil((held.active_rows - rows) / n) + rows,
        layer_gradients=ceil(held.layer_gradients / n),
        end_gradients=ceil(held.end_gradients / n),
        moments=ceil((held.moments - counts) / n) + counts,
        bank=ceil(held.bank / n),
        step_workspace=ceil(held.step_workspace / n),
        gathered=gathered,
    )


def sharded_peaks(held: Holdings, model: Architecture, setting: Setting) -> dict[str, int]:
    """Bytes at the moments that can be a step's largest, as :func:`grass.memory.planner.peaks` has them.

    While a block's backward runs, the gradients of the block before are on their way to the devices that keep them.
    When it ends, its activations are gone and its own gradients are copied for their way.
    """
    assert held.gathered is not None
    block, ends, block_gradients, end_gradients = held.gathered
    static, layers = held.weights + held.active_rows + held.moments, model.layers
    saved, in_layer = held.in_block(setting)
    head, loss = model.head * setting.dtype.itemsize, loss_memory(model, setting, held.traced.loss, head_trains=True)
    computed, sent = (
        max(in_layer + block_gradients / 2, block_gradients) + block_gradients,
        layers * held.layer_gradients,
    )
    next_block = block if layers > 1 else 0
    embedding = 2 * held.traced.block_input + (2 * head if model.tied else 0)
    found = {
        "loss": static + ends + block + saved * layers + held.traced.ends + loss,
        "backward of the last layer": static + ends + block + next_block + saved * layers + head + computed,
        "backward of the first layer": static + ends + block + saved + head + computed + sent - held.layer_gradients,
        "backward of the embedding": static + ends + sent + end_gradients + embedding,
        "reduction of the ends' gradients": static + sent + 2 * end_gradients + held.end_gradients,
        "optimizer step": static + sent + held.end_gradients + held.step_workspace,
    }
    if layers > 1:
        found["backward of the second layer"] = (
            static + ends + 2 * block + 2 * saved + head + computed + sent - 2 * held.layer_gradients
        )
    return {moment: round(size) for moment, size in found.items()}


def _count_bytes(model: Architecture, setting: Setting) -> int:
    """Bytes of the indices and step counts of selected rows, which are state."""
    return model.layers * index_bytes(setting) * sum(r for r, _, _ in active_sizes(model, setting))
