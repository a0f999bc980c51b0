"""Parameter by parameter, what an offloaded optimizer steps, copies and keeps: the tasks of a step, and files."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from grass.kernels.moment_codes import BLOCK
from grass.memory.architecture import Architecture, Linear
from grass.memory.methods import SCALE_BYTES
from grass.memory.setting import MOMENTS, Setting
from grass.offload.host_storage import SMALLEST
from grass.offload.tasks import ParameterStep, Task, schedule


class Stepped(NamedTuple):
    """One parameter.

    Attributes:
        elements: values that are stepped.
        down: bytes of the gradient.
        up: bytes of the values that come up.
        held: bytes of each tensor that ``grass.Offload(path=...)`` may put into a file: copies of the parameter and its
            weight, moments, bank.
    """

    elements: int
    down: int
    up: int
    held: tuple[int, ...]


def step_tasks(method: str, model: Architecture, setting: Setting) -> list[Task]:
    """The tasks of one step, queued as the engine queues them, without work. No sketch goes down.

    Args:
        method: one of :data:`grass.memory.methods.OFFLOADABLE`.
        model: what is trained.
        setting: how.
    """
    return schedule(
        [ParameterStep(name, False, p.elements, p.down, p.up) for name, p in parameters(method, model, setting)]
    )[0]


def bytes_in_files(method: str, model: Architecture, setting: Setting) -> int:
    """Bytes that ``grass.Offload(path=...)`` keeps in files: all but small tensors and buffers of gradients."""
    every = (size for _, p in parameters(method, model, setting) for size in p.held)
    return sum(size for size in every if size >= SMALLEST)


def parameters(method: str, model: Architecture, setting: Setting) -> list[tuple[str, Stepped]]:
    """The parameters with names, in the order in which the engine queues them: the ends, then the blocks.

    Active rows of converted layers come last, because their layers wait for them and not the blocks.
    """
    ends = [("end", _whole(elements, setting)) for elements in model.outside]
    blocks = [(f"block {i}", part) for i in range(model.layers) for part in model.block]
    if method == "AdamW":
        return ends + [(name, _whole(_elements(part), setting)) for name, part in blocks]
    others = [(name, _whole(part, setting)) for name, part in blocks if isinstance(part, int)]
    codes = method == "Grass int8"
    return ends + others + [(name, _active(part, setting, codes)) for name, part in blocks if isinstance(part, Linear)]


def _whole(elements: int, setting: Setting) -> Stepped:
    """A parameter at full rank: its copy and two moments are in its own precision, or it has a float32 master.

    A small one's master stays in memory, unless ``masters=True`` makes it the copy that is stepped.
    """
    size, precise = elements * setting.dtype.itemsize, 4 * elements
    has_master = setting.has_master(elements)
    copies = (size, precise) if has_master and setting.masters else (size,)
    held = (*copies, precise, precise) if has_master else (*copies, size, size)
    return Stepped(elements, size, size, held)


def _active(linear: Linear, setting: Setting, codes: bool) -> Stepped:
    """The active rows of a converted layer; ``codes``: whether its weight is int8 codes and a scale for each row."""
    size, width, experts = linear.size(setting.dim), linear.width(setting.dim), linear.experts
    r, q, size = experts * setting.rank_of(size), experts * setting.explored_of(size), experts * size
    e, active_e, elements = 1 if codes else setting.dtype.itemsize, setting.active_dtype.itemsize, (r + q) * width
    wider = r * width * active_e if codes or setting.active_dtype != setting.dtype else 0
    scales = SCALE_BYTES * (r + q) if codes else 0
    held = (linear.elements * e, elements * active_e, *_state(r, size, width, setting))
    return Stepped(elements, elements * active_e, elements * e + scales + wider, held)


def _state(r: int, size: int, width: int, setting: Setting) -> Iterator[int]:
    """Bytes of each tensor of the state of ``r`` selected rows of a weight that has ``size`` of them."""
    yield 8 * r  # indices
    yield 0 if setting.state_policy == "reset" else 4 * r  # their ages
    for _ in range(2):
        yield r * width * int(MOMENTS[setting.moment_dtype])
        yield SCALE_BYTES * ceil(r * width / BLOCK) if setting.moment_dtype == "8bit" else 0
        yield size * width * setting.bank_dtype.itemsize if setting.state_policy == "bank" else 0
    yield 4 * size if setting.state_policy == "bank" else 0  # ages in the bank


def _elements(part: Linear | int) -> int:
    return part if isinstance(part, int) else part.elements
