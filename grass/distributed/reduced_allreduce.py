"""Dense mode under ``DistributedDataParallel``: a communication hook that sends only selected and explored rows.

DDP's own all-reduce sends the whole gradient ``(m, n)`` of each weight. With this hook a step sends, per projected
weight and before the algorithm's own factor,

=================  ==================  ===========================================================================
step               ``refresh``         elements
=================  ==================  ===========================================================================
between refreshes                      ``(r + q) n``: selected and explored rows (``dim=1``: ``m (r + q)``, columns)
of a refresh       ``"full"``          ``mn``: everything, and rows are chosen from exact norms, as in one process
of a refresh       ``"sketch"``        ``ms + (r + q) n``: a Johnson-Lindenstrauss sketch ``G S``, from whose norms the
                                       rows are chosen, and these rows
=================  ==================  ===========================================================================

and all of every other parameter. A rule that reads no norms (``uniform``) sends ``(r + q) n`` in every step. Rows that
were not sent are zero afterwards, and explored rows are multiplied by ``sqrt((n - r) / q)``: gradient clipping then
sees the same norm on every rank, an unbiased estimate of the whole gradient's.
"""

# No postponed annotations here: DDP compares those of a hook with its own types.

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch documents it and does not export it

from grass.compact_mode.refresh_cycle import rademacher
from grass.optimizer import GrassAdamW
from grass.options import as_matrix, explored_count, is_batch, is_projected, resolve_dim, resolve_rank
from grass.selection.draws import sketch_generator
from grass.selection.exploration import draw_explored, gradient_scale
from grass.selection.projector import Projector
from grass.selection.rules import needs_norms
from grass.state.moments import moment_dtype
from grass.state.refresh import choose, current_projector, is_informative, refresh_due


class ReducedAllreduceState:
    """What :func:`reduced_allreduce_hook` knows: the optimizer, whose selections decide what travels.

    Args:
        optimizer: in dense mode, over the parameters that DDP wraps.
        refresh: what travels in the steps that choose rows: ``"full"`` or ``"sketch"`` (of the group's
            ``sketch_size``).

    Raises:
        ValueError: ``refresh`` is neither; the ranks' optimizers differ in what decides the selection.

    Example:
        >>> ddp_model.register_comm_hook(ReducedAllreduceState(optimizer), reduced_allreduce_hook)
    """

    def __init__(self, optimizer: GrassAdamW, *, refresh: str = "full") -> None:
        if refresh not in ("full", "sketch"):
            raise ValueError(f"Invalid {refresh=}: must be 'full' or 'sketch'")
        if moves_whole_weights(optimizer):
            raise ValueError(
                "The reduced all-reduce needs explore below 1.0, as in explore=0.25: if all rows move, the whole "
                "gradient has to be sent"
            )
        if any(is_batch(p, group) for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("The reduced all-reduce does not take experts in dense mode: use compact mode, or DDP")
        self.optimizer, self.refresh = optimizer, refresh
        self._sent: dict[int, Sent] = {}
        self._watched: set[int] = set()
        optimizer.verify_settings()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The optimizer's."""
        return self.optimizer.process_group or cast(dist.ProcessGroup, dist.group.WORLD)

    def reduce_(self, tensor: Tensor, async_op: bool = False) -> Any:
        """Average over the ranks in place, dividing first, as DDP does."""
        tensor.div_(self.process_group.size())
        return dist.all_reduce(tensor, group=self.process_group, async_op=async_op)

    def travellers(self, bucket: GradBucket) -> "list[Traveller]":
        """What of each gradient in the bucket is to travel; communicates where a sketch has to be reduced first."""
        active, places, index = self.optimizer.layers(), {}, 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                places[id(p)] = group, index
                index += 1
        every = []
        for p, grad in zip(bucket.parameters(), _gradients(bucket), strict=True):
            group, index = places.get(id(p), ({"rank": None}, -1))
            projected = is_projected(p, group) and id(p) not in active
            every.append(Traveller(p, grad, group, index, self.optimizer.state.get(p, {}), projected))
        for item in every:
            self._continue(item)
            if item.rows is None and item.decides and not needs_norms(item.group["selection"]):
                rows = item.matrix.shape[resolve_dim(item.group["dim"], item.matrix.shape)]
                item.decide(torch.ones(rows, device="cpu"))
        if self.refresh == "sketch":
            self._decide([item for item in every if item.rows is None and item.decides and item.sketch_pays])
        for item in every:
            self._note(item)
        return every

    def _continue(self, item: "Traveller") -> None:
        """Go on with a gradient that an earlier synchronisation has left in this step: unscaled, with its rows."""
        sent = self._sent.get(id(item.parameter))
        if sent is None:
            return
        if item.parameter.grad is None:  # dropped since, and this rank does not use the parameter
            del self._sent[id(item.parameter)]
            return
        sent.unscale_(item.grad)
        if sent.age == item.age:
            item.rows, item.explored = sent.rows, sent.explored

    def _note(self, item: "Traveller") -> None:
        """Remember the rows that travel, until the gradient is dropped."""
        if item.rows is None:
            self._sent.pop(id(item.parameter), None)
            return
        self._sent[id(item.parameter)] = Sent(item.rows, item.explored, item.age)
        if id(item.parameter) not in self._watched:
            self._watched.add(id(item.parameter))
            item.parameter.register_hook(_before_adding(self, item.parameter))  # type: ignore[no-untyped-call]

    def before_adding(self, parameter: Tensor) -> None:
        """Prepare what a synchronisation has left of a gradient for the next micro-batch, which is added to it."""
        if parameter.grad is None:
            self._sent.pop(id(parameter), None)
        elif id(parameter) in self._sent:
            self._sent[id(parameter)].unscale_(parameter.grad)

    def _decide(self, undecided: "list[Traveller]") -> None:
        """Choose the rows of gradients from sketches, summed over the ranks at once."""
        if not undecided:
            return
        sketches = [item.sketch() for item in undecided]
        flat = torch.cat([sketch.flatten() for sketch in sketches])
        self.reduce_(flat)
        parts = torch.split(flat, [sketch.numel() for sketch in sketches])
        for item, part, sketch in zip(undecided, parts, sketches, strict=True):
            norms = torch.linalg.vector_norm(part.view_as(sketch), dim=1)
            self.optimizer.given_norms[item.parameter] = norms
            item.decide(norms.cpu())


def _before_adding(state: ReducedAllreduceState, parameter: Tensor) -> Callable[[Tensor], None]:
    """A hook that runs before a gradient is added to ``parameter.grad``; it keeps neither of the two alive."""
    state_reference, parameter_reference = weakref.ref(state), weakref.ref(parameter)

    def hook(added: Tensor) -> None:
        found, p = state_reference(), parameter_reference()
        if found is not None and p is not None:
            with torch.no_grad():
                found.before_adding(p)

    return hook


def moves_whole_weights(optimizer: GrassAdamW) -> bool:
    """Whether some weight of dense mode explores all rows that it does not select."""
    layers = optimizer.layers()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if is_projected(p, group) and id(p) not in layers:
                matrix = torch.empty(p.shape, device="meta").flatten(1)
                size = matrix.shape[resolve_dim(group["dim"], matrix.shape)]
                rank = resolve_rank(group["rank"], size)
                if 0 < size - rank == explored_count(group, rank, size):
                    return True
    return False


def reduced_allreduce_hook(state: ReducedAllreduceState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average over the ranks what the optimizer will use of a bucket; for ``ddp_model.register_comm_hook``.

    Works with every bucket layout, ``no_sync``, ``gradient_as_bucket_view``, static graphs, unused parameters, and
    inside torch's ``fp16_compress_wrapper`` and ``bf16_compress_wrapper``. Gradients may also be accumulated without
    ``no_sync``, for more bytes. With ``refresh="sketch"`` the first micro-batch then decides the rows of the step.
    """
    if bucket.index() == 0:
        state.optimizer.verify_settings()  # sizes depend on them
    buffer, travellers = bucket.buffer(), state.travellers(bucket)
    whole = all(item.rows is None for item in travellers)
    flat = buffer if whole else pack(travellers, buffer)

    def unpack(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        values: Tensor = future.value()[0]
        if not whole:
            buffer.zero_()
            for item, part in zip(travellers, torch.split(values, [item.size for item in travellers]), strict=True):
                item.put(part)
        return buffer

    reduced: torch.futures.Future[Tensor] = state.reduce_(flat, async_op=True).get_future().then(unpack)
    return reduced


@dataclass
class Sent:
    """What a synchronisation has left in a gradient: these rows, explored ones scaled.

    Attributes:
        rows: as in :class:`Traveller`.
        explored: how many of these are explored.
        age: steps and selections of the weight at that time; ``None`` if nothing decided the rows.
        scaled: whether the explored rows have their scale.
    """

    rows: Projector
    explored: int
    age: tuple[int, int] | None
    scaled: bool = True

    def unscale_(self, grad: Tensor) -> None:
        """Take the scale from a gradient once: what is added to it has none, and all is scaled afterwards."""
        if self.explored and self.scaled:
            matrix = as_matrix(grad)
            count = self.rows.indices.numel()
            factor = gradient_scale(matrix.shape[self.rows.dim], count - self.explored, self.explored)
            explored = Projector(self.rows.indices[-self.explored :], None, self.rows.dim)
            explored.scatter_(matrix, explored.gather(matrix) / factor)
            _put_back(matrix, grad)
        self.scaled = False


@dataclass
class Traveller:
    """One gradient in a bucket, and which rows of it travel.

    Attributes:
        rows: the rows without their scale, each once, explored rows last; ``None``: all.
        explored: how many of these are explored.
        decides: whether the coming step chooses rows.
        age: steps and selections so far; ``None`` if the gradient was zero and could not decide the rows.
    """

    parameter: Tensor
    grad: Tensor
    group: dict[str, Any]
    index: int
    state: dict[str, Any]
    projected: bool
    rows: Projector | None = None
    explored: int = 0

    def __post_init__(self) -> None:
        self.age: tuple[int, int] | None = self.state.get("step", 0), self.state.get("refreshes", 0)
        self.decides = self.projected and refresh_due(self.state, self.group)
        if self.projected and not self.decides:
            self._travel(current_projector(self.state))

    @property
    def matrix(self) -> Tensor:
        """``(m, n)``."""
        return as_matrix(self.grad)

    @property
    def size(self) -> int:
        """How many elements travel."""
        if self.rows is None:
            return self.grad.numel()
        return self.rows.indices.numel() * (self.grad.numel() // self.matrix.shape[self.rows.dim])

    @property
    def sketch_pays(self) -> bool:
        """Whether a sketch is smaller than the gradient."""
        dim = resolve_dim(self.group["dim"], self.matrix.shape)
        return bool(self.group["sketch_size"] < self.matrix.shape[1 - dim])

    def sketch(self) -> Tensor:
        """``G S (m, s)``, for columns ``G^T S (n, s)``, float32 or finer; every rank has the same ``S``."""
        dim = resolve_dim(self.group["dim"], self.matrix.shape)
        matrix = self.matrix.to(moment_dtype(self.matrix))
        matrix = matrix if dim == 0 else matrix.t()
        generator = sketch_generator(self.group["seed"], matrix.shape[1], self.state.get("refreshes", 0))
        return matrix @ rademacher(matrix.shape[1], self.group["sketch_size"], generator).to(matrix)

    def decide(self, norms: Tensor) -> None:
        """Have the rows travel that the optimizer will choose from ``norms``."""
        dim = resolve_dim(self.group["dim"], self.matrix.shape)
        rank = resolve_rank(self.group["rank"], self.matrix.shape[dim])
        selection = choose(self.state, norms, rank, self.group, self.index)
        device = self.grad.device
        self.age = self.age if is_informative(norms) else None
        self._travel(Projector.from_selection(selection, dim, device) if selection else current_projector(self.state))

    def take(self) -> Tensor:
        """What travels, flat."""
        return self.grad.flatten() if self.rows is None else self.rows.gather(self.matrix).flatten()

    def put(self, values: Tensor) -> None:
        """Set what travelled."""
        if self.rows is None:
            self.grad.copy_(values.view_as(self.grad))
            return
        matrix, dim, count = self.matrix, self.rows.dim, self.rows.indices.numel()
        shape = list(matrix.shape)
        shape[dim] = count
        values = values.view(shape)
        if self.explored:
            rank = count - self.explored
            values.narrow(dim, rank, self.explored).mul_(gradient_scale(matrix.shape[dim], rank, self.explored))
        self.rows.scatter_(matrix, values)
        _put_back(matrix, self.grad)

    def _travel(self, projector: Projector) -> None:
        indices = projector.indices if projector.scale is None else torch.unique_consecutive(projector.indices)
        size, step = self.matrix.shape[projector.dim], self.state.get("step", 0)
        self.explored = explored_count(self.group, len(indices), size)
        if self.explored:
            drawn = draw_explored(indices, size, self.explored, self.group["seed"], self.index, step)
            indices = torch.cat([indices, drawn])
        self.rows = Projector(indices.to(self.grad.device), None, projector.dim)  # offloaded state is on the host


def _put_back(matrix: Tensor, grad: Tensor) -> None:
    """Copy a changed matrix into the gradient if it is a copy of it, as with channels_last."""
    if matrix.data_ptr() != grad.data_ptr():
        grad.copy_(matrix.view(grad.shape))


def pack(travellers: list[Traveller], buffer: Tensor) -> Tensor:
    """What travels of a bucket, in one flat tensor."""
    flat = buffer.new_empty(sum(item.size for item in travellers))
    for item, part in zip(travellers, torch.split(flat, [item.size for item in travellers]), strict=True):
        part.copy_(item.take())
    return flat


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """The bucket's gradients with the strides of their parameters, in which DDP lays them out."""
    views = []
    for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        strides = torch.empty_like(p, device="meta").stride()  # p's own where it is dense
        views.append(grad if p.is_contiguous() else grad.as_strided(p.shape, strides, grad.storage_offset()))
    return views
