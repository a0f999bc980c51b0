"""What a parameter's step copies, and what its state takes on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.offload.in_place import InPlace
from grass.offload.options import Offload
from grass.options import Options, as_matrix, resolve_dim
from grass.parallel.shards import local
from grass.state.master import keeps_master


class Sizes(NamedTuple):
    """What a parameter's step on the host and its visit to the device copy.

    Attributes:
        elements: values that are stepped.
        down: bytes of the gradient.
        up: bytes of the values that come up.
        state: bytes of the state that visits the device, each way.
    """

    elements: int
    down: int
    up: int
    state: int


def bytes_at_home(p: Tensor, layer: CompactLayer | None, options: Options, offload: Offload) -> int:
    """Bytes that a parameter's copies, moments and bank take on this rank's host. Moments are counted as float32.

    A parameter that lies there already (:mod:`grass.streaming`) has no copies but its master.
    """
    p = local(p.detach())
    weight = p if layer is None else local(layer.weight.detach())
    has_master = offload.has_master(p) or (keeps_master(p) and not options.projects(p))
    copies = 4 * p.numel() * has_master if layer is None else weight.nbytes
    if not InPlace.marks(p):
        copies += p.nbytes
    elif layer is not None:
        copies = 0
    values = p.numel()
    if layer is None and options.projects(p):
        matrix = as_matrix(p)
        size = matrix.shape[resolve_dim(options.dim, matrix)]
        values = p.numel() // max(size, 1) * options.selected(size)
    bank = 0
    if options.state_policy == "bank" and (layer is not None or options.projects(p)):
        bank = 2 * weight.numel() * getattr(torch, options.bank_dtype).itemsize
    return copies + 8 * values + bank
