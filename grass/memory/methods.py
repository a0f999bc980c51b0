"""What each way of training holds, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from grass.memory.activations import traced
from grass.memory.architecture import Architecture
from grass.memory.setting import MOMENTS, Setting
from grass.memory.tracing import Traced


class Host(NamedTuple):
    """Bytes that offload keeps in host memory (:mod:`grass.offload`).

    Attributes:
        weights: copies of all weights, in their dtype.
        active_rows: copies of the selected and explored rows and their indices.
        gradients: buffers that gradients are copied to.
        moments: those that the device has without offload.
        masters: float32 copies of parameters that are stepped whole.
        activations: inputs of units between forward and backward (:mod:`grass.streaming`).
    """

    weights: int = 0
    active_rows: int = 0
    gradients: int = 0
    moments: int = 0
    masters: int = 0
    activations: int = 0


NO_HOST = Host()
"""Without offload."""


class Gathered(NamedTuple):
    """Bytes that every device holds for a while of a model that is divided among them (:mod:`grass.memory.sharding`).

    Attributes:
        block: of a block with its active rows.
        ends: of everything outside the blocks.
        block_gradients: of a block before they are reduced.
        end_gradients: likewise of the ends.
    """

    block: int
    ends: int
    block_gradients: int
    end_gradients: int

    def most(self, layers: int) -> int:
        """The most at a time, in backward of a block: the next one is there, gradients of the last one are sent."""
        return self.ends + min(layers, 2) * (self.block + self.block_gradients)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Bytes; "layer" is one block.

    Attributes:
        weights: all of the model's.
        active_rows: Grass's selected and explored rows and their indices, LoRA's adapters.
        layer_gradients: of one layer.
        end_gradients: of everything outside the blocks, embedding and head.
        moments: optimizer state on the device.
        bank: moments in host memory.
        host: what offload keeps in host memory beside the bank; empty without it.
        traced: what blocks hold whose matrices do not train.
        layer_saved: what forward saves of a layer by this method.
        layer_workspace: what a layer's forward and backward need beside that.
        step_workspace: what the optimizer's step needs at its largest weight.
        refresh_saved: ``layer_saved`` in steps that gather a sketch.
        refresh_layer: a layer's sketch matrices in such steps.
        refresh_layer_gradients: and the sketches themselves, which are gradients.
        inputs: blocks whose inputs checkpointing keeps on the device; ``None``: all.
        codes: whether the blocks' weights are int8 codes.
        whole: elements of each parameter that is stepped whole.
        in_backward: whether a gradient is stepped and freed as soon as it is complete.
        gathered: what is whole for a while, where all else is divided among several devices.
    """

    weights: int
    active_rows: int = 0
    layer_gradients: int
    end_gradients: int
    moments: int
    bank: int = 0
    host: Host = NO_HOST
    traced: Traced
    layer_saved: float
    layer_workspace: int = 0
    step_workspace: int = 0
    refresh_saved: float = 0
    refresh_layer: int = 0
    refresh_layer_gradients: int = 0
    inputs: int | None = None
    codes: bool = False
    whole: tuple[int, ...] = ()
    in_backward: bool = False
    gathered: Gathered | None = None

    def inputs_of(self, model: Architecture) -> int:
        """Blocks whose inputs are on the device at a time under checkpointing."""
        return model.layers if self.inputs is None else self.inputs

    def in_block(self, setting: Setting, *, refresh: bool = False) -> tuple[float, float]:
        """What a block keeps for its backward, and what its backward needs beside that."""
        activations = self.refresh_saved if refresh else self.layer_saved
        saved = self.traced.block_input if setting.checkpointing else activations
        return saved, (activations if setting.checkpointing else 0) + self.traced.temporaries + self.layer_workspace


Method = Callable[[Architecture, Setting], Holdings]

DENSE_STEP = 8
"""Bytes per element of a weight that a step of dense mode takes while it runs."""

ROUNDING = 45
"""Bytes per element that stochastic rounding of explored rows takes while it runs: bits and sums are int64."""

NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes per element of a weight of QLoRA."""

QUANTISING = 48
"""Bytes per element that writing active rows back as int8 codes takes while it runs."""


def adamw(model: Architecture, setting: Setting) -> Holdings:
    """``torch.optim.AdamW(fused=True)``: gradients and two moments like the weights."""
    e = setting.dtype.itemsize
    return Holdings(
        weights=model.parameters * e,
        layer_gradients=(model.layer_matrix + model.vectors) * e,
        end_gradients=model.ends * e,
        moments=2 * model.parameters * e,
        traced=traced(model, setting, linears=False),
        layer_saved=traced(model, setting, linears=True).block,
        whole=model.whole(linears=True),
    )


def adamw_float32(model: Architecture, setting: Setting) -> Holdings:
    """AdamW with float32 masters and moments beside weights and gradients in ``dtype``, as large models are trained."""
    masters = 4 * model.parameters if setting.dtype != torch.float32 else 0
    return replace(adamw(model, setting), moments=8 * model.parameters + masters)


def adamw_8bit(model: Architecture, setting: Setting) -> Holdings:
    """AdamW with the moments of matrices in 8 bits and a float32 scale per 256 elements (bitsandbytes, torchao).

    Its step is taken to run in one pass, as theirs does where it is compiled.
    """
    full = adamw(model, setting)
    vectors = model.layers * model.vectors
    moments = 2 * ((model.parameters - vectors) * MOMENTS["8bit"] + vectors * 4)
    return Holdings(**{**vars(full), "moments": round(moments)})


def lora(model: Architecture, setting: Setting) -> Holdings:
    """LoRA on every linear layer of the blocks (Hu et al., 2021), as ``peft`` computes it; all else is frozen.

    Adapters ``A (r, n)`` and ``B (m, r)`` and their moments in ``active_dtype``; each saves its input, cast to that,
    and ``x A^T``.
    """
    active_e = setting.active_dtype.itemsize
    r = setting.lora_rank
    adapters = sum(linear.experts * r * (linear.m + linear.n) for linear in model.linears)
    frozen, cast = traced(model, setting, linears=False, others=False), setting.active_dtype != setting.dtype
    inputs = setting.tokens * active_e * r * sum(linear.used for linear in model.linears)
    if cast:
        inputs += setting.tokens * active_e * sum(linear.used * linear.n for linear in model.linears)
    return Holdings(
        weights=model.parameters * setting.dtype.itemsize,
        active_rows=model.layers * adapters * active_e,
        layer_gradients=adapters * active_e,
        end_gradients=0,
        moments=2 * model.layers * adapters * active_e,
        traced=frozen,
        layer_saved=inputs + (frozen if cast else traced(model, setting, linears=True, others=False)).block,
    )


def qlora(model: Architecture, setting: Setting) -> Holdings:
    """LoRA over weights of blocks in 4 bits (Dettmers et al., 2023), each decoded to ``dtype`` where it is used.

    NF4 with two scales, of 64 elements in 8 bits and of 256 of those in float32: :data:`NF4` bytes an element.
    """
    plain, e = lora(model, setting), setting.dtype.itemsize
    saved = model.layers * model.layer_matrix * (e - NF4)
    largest = max(linear.m * linear.n for linear in model.linears)
    return replace(plain, weights=round(plain.weights - saved), layer_workspace=largest * e)


def galore(model: Architecture, setting: Setting) -> Holdings:
    """GaLore (Zhao et al., 2024) as galore-torch steps it: full gradients, moments ``2 r max(m, n)``, a projection.

    Its workspace is that of a singular value decomposition, input and two orthogonal factors in float32, or of the
    embedding's step, whose update and denominator exist whole. What the decomposition needs inside is not counted.
    """
    e = setting.dtype.itemsize
    sides = [(min(linear.m, linear.n), max(linear.m, linear.n), linear.experts) for linear in model.linears]
    state = sum(experts * setting.rank_of(short) * (short + 2 * long) for short, long, experts in sides)
    rest = model.layers * model.vectors + model.ends
    largest = max(linear.m * linear.n for linear in model.linears)
    full = adamw(model, setting)
    moments = (model.layers * state + 2 * rest) * e
    return Holdings(**{**vars(full), "moments": moments, "step_workspace": max(3 * 4 * largest, 2 * model.head * e)})


def grass_dense(model: Architecture, setting: Setting) -> Holdings:
    """:class:`grass.GrassAdamW` in dense mode: whole gradients, moments of ``r`` rows, and all other rows explored."""
    full, compact = adamw(model, setting), grass(model, setting)
    largest = max(linear.elements for linear in model.linears)
    return replace(full, moments=compact.moments, bank=compact.bank, step_workspace=DENSE_STEP * largest)


def grass_in_backward(model: Architecture, setting: Setting) -> Holdings:
    """Dense mode with :func:`grass.step_in_backward`, where a gradient lives until it is complete."""
    return replace(grass_dense(model, setting), in_backward=True)


def grass(model: Architecture, setting: Setting) -> Holdings:
    """``grass.compact(model, rank=..., explore=..., dim=..., dtype=active_dtype)`` and :class:`grass.GrassAdamW`.

    Active rows, their gradients and, for ``dim=1``, saved inputs count ``r + q`` rows, moments ``r``.
    """
    e, active_e, dim, layers = setting.dtype.itemsize, setting.active_dtype.itemsize, setting.dim, model.layers
    every = active_sizes(model, setting)
    selected, active = sum(r for r, _, _ in every), sum(r + q for r, q, _ in every)
    used = (linear.used / linear.experts for linear in model.linears)
    saved = round(sum((r + q) * share for (r, q, _), share in zip(every, used, strict=True)))
    with_state, rows = sum(r * width for r, _, width in every), sum((r + q) * width for r, q, width in every)
    dense = layers * model.vectors + model.ends
    moments = layers * (2 * with_state * MOMENTS[setting.moment_dtype] + index_bytes(setting) * selected)
    moments += 2 * dense * e
    if not setting.offload:
        moments += (4 + 2 * (4 - e)) * _with_master(model.whole(linears=False), setting)
    selectable = sum(linear.experts * linear.size(dim) for linear in model.linears)
    bank = layers * (2 * model.layer_matrix * setting.bank_dtype.itemsize + 4 * selectable)
    frozen, whole = traced(model, setting, linears=False), traced(model, setting, linears=True).block
    sketch = setting.sketch_size if setting.gathers_sketch else 0
    rounding = ROUNDING if active_e > e else 8
    return Holdings(
        weights=model.parameters * e,
        active_rows=layers * (rows * active_e + 8 * active),
        layer_gradients=rows * active_e + model.vectors * e,
        end_gradients=model.ends * e,
        moments=round(moments),
        bank=bank if setting.state_policy == "bank" else 0,
        traced=frozen,
        layer_saved=frozen.block + setting.tokens * saved * e if dim == 1 else whole,
        step_workspace=max((12 * r + rounding * q) * width for r, q, width in every),
        refresh_saved=whole if sketch else 0,
        refresh_layer=sketch * (4 * selectable + sum(width for _, _, width in every) * e),
        refresh_layer_gradients=sketch * 4 * selectable,
        whole=model.whole(linears=False),
    )


def active_index_bytes(held: Holdings, model: Architecture, setting: Setting) -> int:
    """Bytes of the indices of a block's active rows."""
    return 8 * sum(r + q for r, q, _ in active_sizes(model, setting)) if held.active_rows else 0


def index_bytes(setting: Setting) -> int:
    """Bytes of what is kept of a selected row beside its moments: its index, and a step count of its own."""
    return 8 if setting.state_policy == "reset" else 12


SCALE_BYTES = 4
"""Bytes of the scale of a row of int8 codes."""


def scale_bytes(model: Architecture, setting: Setting) -> int:
    """Bytes of the scales of int8 codes of a block."""
    return SCALE_BYTES * sum(linear.experts * linear.size(setting.dim) for linear in model.linears)


def grass_int8(model: Architecture, setting: Setting) -> Holdings:
    """Grass with ``weights="int8"``: a float32 scale per row (``dim=0``) or column (``dim=1``), cast layer by layer."""
    plain, e = grass(model, setting), setting.dtype.itemsize
    saved = model.layers * (model.layer_matrix * (e - 1) - scale_bytes(model, setting))
    largest = max(linear.elements for linear in model.linears)
    written = max((r + q) * width for r, q, width in active_sizes(model, setting))
    return Holdings(
        **{
            **vars(plain),
            "weights": plain.weights - saved,
            "layer_workspace": largest * e,
            "step_workspace": QUANTISING * written,
            "codes": True,
        }
    )


def offloaded(method: str, held: Holdings, model: Architecture, setting: Setting) -> Holdings:
    """The same method with ``offload``: its step has no workspace on the device, but places for what comes up.

    Stepped rows of a converted weight wait in the weight's precision until the next forward comes to them, int8 codes
    with their scales, and selected rows that are more precise in their own. They are counted for all weights at once.
    """
    e, scale_e = (1, SCALE_BYTES) if held.codes else (setting.dtype.itemsize, 0)
    active_e, rows = setting.active_dtype.itemsize, 0
    if held.active_rows:
        every = active_sizes(model, setting)
        rows = sum(
            (r + q) * (width * e + scale_e) + (r * width * active_e if active_e != e else 0) for r, q, width in every
        )
    gradients = model.layers * held.layer_gradients + held.end_gradients
    masters = _with_master(held.whole, setting)
    moments = held.moments + 2 * (4 - setting.dtype.itemsize) * masters
    host = Host(held.weights, held.active_rows, gradients, moments, 4 * masters)
    return replace(held, moments=0, host=host, step_workspace=model.layers * rows)


def _with_master(whole: tuple[int, ...], setting: Setting) -> int:
    """Elements that have a float32 master, and float32 moments."""
    return sum(elements for elements in whole if setting.has_master(elements))


OFFLOADABLE = ("AdamW", "Grass", "Grass int8")
"""Methods that offload takes."""

METHODS: dict[str, Method] = {
    "AdamW": adamw,
    "AdamW float32": adamw_float32,
    "8-bit AdamW": adamw_8bit,
    "LoRA": lora,
    "QLoRA": qlora,
    "GaLore": galore,
    "Grass dense": grass_dense,
    "Grass in backward": grass_in_backward,
    "Grass": grass,
    "Grass int8": grass_int8,
}
"""Methods by name, as ``--method`` and the tables have it."""


def active_sizes(model: Architecture, setting: Setting) -> list[tuple[int, int, int]]:
    """Selected rows, explored rows and their length, for each linear layer of a block; of experts those of all."""
    found = []
    for linear in model.linears:
        size, width = linear.size(setting.dim), linear.width(setting.dim)
        found.append((linear.experts * setting.rank_of(size), linear.experts * setting.explored_of(size), width))
    return found
