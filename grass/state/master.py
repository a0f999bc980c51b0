"""Float32 masters of small half-precision parameters at full rank, under ``"master"`` in their state.

A norm's values lie near 1, where the spacing of bfloat16 is 1/128 above and 1/256 below. A step of 1e-3 is less than
half of both, so rounding to nearest undoes it, in every step. So the step is applied to a master, and the parameter is
the rounded master. Its moments are float32 too: a second moment that decays by a thousandth does not in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass.state.schema import MOMENTS, State

SMALL = 1 << 16
"""Elements up to which a parameter of any shape has a master.

Together with all vectors, these are norms, biases, gates, and most routers. Of a language model they are less than a
thousandth of the parameters, so 8 more bytes for each element do not count. Embeddings and heads are larger.
"""


def is_half(dtype: torch.dtype) -> bool:
    """Whether values of this type are in half precision."""
    return dtype in (torch.bfloat16, torch.float16)


def keeps_master(p: Tensor) -> bool:
    """Whether a parameter at full rank has a master: in half precision, a vector or at most :data:`SMALL` elements.

    A ``DTensor`` counts as a whole, so that all ranks agree.
    """
    return is_half(p.dtype) and (p.ndim < 2 or p.numel() <= SMALL)


def begin_master(p: Tensor, state: State) -> None:
    """Add a master to a state that lacks one, with moments in float32; drop one that its parameter does not need."""
    if not keeps_master(p):
        state.pop("master", None)
    elif "master" not in state:
        for key in MOMENTS:
            state[key] = state[key].to(torch.float32)
        state["master"] = p.detach().to(torch.float32, copy=True)


def current(values: Tensor, *masters: Tensor) -> Tensor:
    """Values in the precision of masters: each that a master rounds to is the master's, the last one that does so.

    Args:
        values: in half precision.
        masters: float32, of the same shape; at least one.
    """
    found = values.to(masters[0].dtype)
    for master in masters:
        found = torch.where(master.to(values.dtype) == values, master, found)
    return found


def follow_(masters: list[Tensor], every: list[Tensor]) -> None:
    """:func:`current` of many, in place, by a few operations for each device and precision.

    Args:
        masters: float32.
        every: the values of their parameters, in half precision.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for master, values in zip(masters, every, strict=True):
        buckets.setdefault((values.device, values.dtype), []).append((master, values))
    for pairs in buckets.values():
        held, now = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs, strict=True))
        parts = torch.split(current(now, held), [master.numel() for master, _ in pairs])
        torch._foreach_copy_([m for m, _ in pairs], [t.view(m.shape) for t, (m, _) in zip(parts, pairs, strict=True)])
