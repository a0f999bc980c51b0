"""The cycle of a converted layer under an optimizer: :class:`grass.GrassAdamW` and :func:`grass.attach` share it.

1. :func:`adopt` creates state for the rows that the conversion selected.
2. :func:`arm` begins a sketch if the coming step will choose rows by norms.
3. The optimizer steps the active rows and writes them back.
4. :func:`advance` chooses new rows if that is due, carries their state over, draws other explored rows, and arms again.

After loading, :func:`resume` returns to the saved rows. An optimizer that goes on where another ended begins with
:func:`take_over`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.compact_mode.active_rows import ExploredViews, explore
from grass.compact_mode.layer import CompactLayer
from grass.cpu.draw import Draws
from grass.options import Options
from grass.parallel.ranks import Ranks
from grass.parallel.shards import check_shards, is_sharded, local
from grass.selection.draws import sketch_generator
from grass.selection.exploration import draw_explored, draw_explored_of_each, draw_key
from grass.selection.rules import needs_norms
from grass.state.refresh import (
    Carry,
    have_tokens,
    is_informative,
    norms_of_experts,
    of_each,
    refresh,
    refresh_due,
)
from grass.state.schema import State, shared_steps

NEW: State = {"step": 0, "refresh_step": 0, "refreshes": 1}
"""The counters of active rows that have not been stepped."""


class Trained(NamedTuple):
    """A converted layer under an optimizer.

    Attributes:
        layer: the layer.
        state: the age and the indices of its selection, for ``GrassAdamW`` also the moments.
        position: its place among all parameters, which decides draws.
        grad: the gradient of its active rows in this step.
        views: of its explored rows, where the step has made them already.
    """

    layer: CompactLayer
    state: State
    position: int
    grad: Tensor | None = None
    views: ExploredViews | None = None

    def seen(self) -> Tensor:
        """bool ``(experts,)``: which experts had tokens, by the gradient of their selected rows."""
        if self.grad is None or not self.layer.is_batch:
            return torch.ones(self.layer.experts, dtype=torch.bool, device=self.layer.active.device)
        rows = self.layer.selected_part(local(self.grad))
        return have_tokens(of_each(rows, self.layer.dim, self.layer.experts), self.grad)


def adopt(layer: CompactLayer, state: State, carry: Carry) -> State:
    """Start the state of a layer with the rows that its conversion selected. Returns the state."""
    check_sharding(layer)
    state.update(step=0, refresh_step=0, refreshes=1, indices=layer.selected.clone(), dim=layer.dim)
    state["explored"] = layer.explored.numel()
    carry(None, layer.projector(), None)
    reserve_rows(state, layer)
    return state


def check_sharding(layer: CompactLayer) -> None:
    """Raise ``ValueError`` if a layer is sharded in a way that it cannot be."""
    if is_sharded(layer.active):
        check_can_be_sharded(layer)
    check_shards(layer.of_stratum(layer.weight), layer.weight_axis(layer.dim), "weight", batch=layer.is_batch)
    check_shards(layer.of_stratum(layer.active), layer.dim, "active")


def check_can_be_sharded(layer: CompactLayer) -> None:
    """Raise ``ValueError`` if the weight is stored as codes."""
    if layer.weights:
        raise ValueError(
            f"weights={layer.weights!r} of {layer.label!r} cannot be sharded: their scales belong to whole rows"
        )


def check_rows(layer: CompactLayer, state: State) -> None:
    """Raise ``ValueError`` if a state was saved with other numbers of rows than the layer has."""
    count, rank = layer.explored.numel() * layer.strata, layer.rank * layer.strata
    explored = state.get("explored", count)
    selected = len(state["indices"]) if "indices" in state else len(state["chosen"]) - explored
    if (selected, state["dim"]) != (rank, layer.dim):
        raise ValueError(
            f"State of active rows with rank={selected}, dim={state['dim']} for {layer.label!r} "
            f"with rank={rank}, dim={layer.dim}: convert the model as the one that was saved"
        )
    if explored != count:
        raise ValueError(
            f"State of active rows with explore={explored} for {layer.label!r} with explore={count}: convert the model "
            "as the one that was saved"
        )


def reserve_rows(state: State, layer: CompactLayer) -> None:
    """Reserve a key for the rows' values if the weight cannot hold them; ``state_dict`` puts the values there.

    The state needs the key because distributed checkpoint loads only the keys that the optimizer's state has.
    """
    state.pop("active", None)
    if layer.active.dtype != layer.weight.dtype:
        state["active"] = torch.empty(0, dtype=layer.active.dtype, device=layer.active.device)


def waiting(layer: CompactLayer) -> State:
    """What to save of a layer that was not stepped: its rows, and their values where the weight cannot hold them.

    They need not be the rows that a conversion draws, but may be an earlier optimizer's, or from :func:`take_over`.
    Of a layer that ranks divide nothing is saved.
    """
    if layer.strata > 1:
        return {}
    state: State = {"step": 0, "chosen": layer.chosen.clone(), "explored": layer.explored.numel(), "dim": layer.dim}
    reserve_rows(state, layer)
    return state


def wait_again(layer: CompactLayer, state: State, options: Options) -> None:
    """Return to what :func:`waiting` has saved."""
    selected, explored = state["chosen"][: layer.rank], state["chosen"][layer.rank :]
    layer.restore(selected, explored, state.get("active"))
    arm(layer, NEW, options)


def resume(layer: CompactLayer, state: State, values: Tensor | None, options: Options, index: int) -> None:
    """Return a layer to the rows of a loaded state; ``values`` as in :meth:`CompactLayer.restore`."""
    key = options.seed, layer.place(index), state["step"]
    indices, chosen = state["indices"], state.pop("chosen", None)
    if chosen is not None:
        explored = chosen[layer.rank :]
    elif _draws_again(layer, state):
        explored = drawn_beside(indices, layer, key)
    else:
        if not state["step"] and not torch.equal(layer.draw_first()[: layer.rank], indices.cpu()):
            layer.draw_first_by(options.seed)  # as take_over() did
        explored = layer.draw_first()[layer.rank :]
    layer.restore(indices, explored, values)
    reserve_rows(state, layer)
    arm(layer, state, options)


def restart(layer: CompactLayer, options: Options) -> None:
    """Return a layer to the rows that its conversion drew: a state from before its first step is empty."""
    first = layer.draw_first().to(layer.chosen.device)
    if layer.synced.stepped or not torch.equal(first, layer.chosen):
        layer.restore(first[: layer.rank], first[layer.rank :])
    layer.end_sketch()
    arm(layer, NEW, options)


def take_over(layer: CompactLayer, options: Options) -> None:
    """Draw the first rows anew where an optimizer with another seed has stepped the layer before.

    An optimizer that lives shorter than ``update_interval`` would train the rows that the conversion drew, as all
    before it.
    """
    if layer.drawn_by is not None and layer.drawn_by[0] != options.seed:
        layer.draw_first_by(options.seed)
        restart(layer, options)


def advance(every: list[Trained], options: Options, ranks: Ranks, carry_of: Callable[[Trained], Carry]) -> list[Tensor]:
    """Make layers that were stepped and written back ready for the next forward.

    Args:
        every: the layers.
        options: the options that they share.
        ranks: the ranks that train the model together.
        carry_of: returns how the state of a layer follows its selection.

    Returns:
        The selected rows of each layer that chose rows, which all ranks have chosen alike.
    """
    for item in every:
        item.layer.synced.note_step()
        item.layer.before_change()
    due = [item for item in every if refresh_due(item.state, options)]
    norms = _norms_for(due, options, ranks)
    for item, layer_norms, informative in zip(due, norms, _informative(due, norms, options, ranks), strict=True):
        _choose_rows(item, layer_norms, informative, carry_of(item), options)
    _explore_other_rows(every, options)
    for layer, state, *_ in every:
        layer.mark_synced()
        layer.after_change(everything=options.decay == "all" and options.weight_decay != 0)
        arm(layer, state, options)
    return [item.state["indices"] for item in due if item.layer.strata == 1]


def arm(layer: CompactLayer, state: State, options: Options) -> None:
    """Begin a sketch if the coming step will choose rows by a rule that reads norms."""
    due = shared_steps(state) + 1 >= options.update_interval
    if due and layer.sketch is None and needs_norms(options.selection):
        width = layer.shape[1 - layer.dim]
        exact = options.refresh == "exact" or options.sketch_size >= width
        generator = sketch_generator(options.seed, width, state["refreshes"])
        layer.begin_sketch(None if exact else rademacher(width, options.sketch_size, generator).to(layer.rows()))


def gathered_norms(layers: list[CompactLayer], ranks: Ranks) -> list[Tensor]:
    """Stop gathering sketches, average them over the ranks, and return the row norms of each.

    The norms are the first rank's: kernels of unlike devices may differ in their last bits, and then in the rows.
    If a sketch overflowed, its norms are all zero: its largest rows would otherwise count as the smallest.
    """
    sketches = [layer.end_sketch() for layer in layers]
    ranks.mean_([sketch for sketch, layer in zip(sketches, layers, strict=True) if not layer.sums_sketch])
    norms = [torch.linalg.vector_norm(s if s.isfinite().all() else torch.zeros_like(s), dim=1) for s in sketches]
    ranks.first_([of_all for of_all, layer in zip(norms, layers, strict=True) if not layer.sums_sketch])
    return [layer.rows_of_stratum(of_all) for layer, of_all in zip(layers, norms, strict=True)]


def rademacher(width: int, size: int, generator: torch.Generator) -> Tensor:
    """A Johnson-Lindenstrauss matrix ``S (width, size)`` of random signs over ``sqrt(size)``: ``E[S S^T] = I``."""
    zeros_and_ones = torch.randint(2, (width, size), generator=generator, dtype=torch.int8, device="cpu")
    signs: Tensor = 2 * zeros_and_ones - 1
    return signs / math.sqrt(size)


def _norms_for(every: list[Trained], options: Options, ranks: Ranks) -> list[Tensor]:
    """Row norms of each layer's gradient, from its sketch; for a rule that does not read them, of what had tokens."""
    layers = [item.layer for item in every]
    if needs_norms(options.selection):
        norms = gathered_norms(layers, ranks)
        for layer, layer_norms in zip(layers, norms, strict=True):
            layer.norms = layer_norms
        return norms
    return [norms_of_experts(item.seen(), item.layer.shape[item.layer.dim]) for item in every]


def _informative(every: list[Trained], norms: list[Tensor], options: Options, ranks: Ranks) -> list[bool | None]:
    """Whether norms decide the selection of each layer; ``None`` where :func:`refresh` finds out.

    Of a layer that ranks divide, the norms of any stratum decide: all ranks must count the same refreshes, or one of
    them would wait for the others in the next step.
    """
    reads = needs_norms(options.selection)
    divided = [item.layer.strata > 1 and (reads or item.layer.is_batch) for item in every]
    own = [is_informative(each) for each, asks in zip(norms, divided, strict=True) if asks]
    found = iter(ranks.any_of_each(own, norms[0].device) if own else [])
    return [next(found) if asks else None for asks in divided]


def _choose_rows(item: Trained, norms: Tensor, informative: bool | None, carry: Carry, options: Options) -> None:
    """Select the rows that train from the next step on."""
    layer, state, position, *_ = item
    refresh(state, carry, norms, layer.dim, layer.rank, options, position, layer.experts, informative=informative)
    if "row_scale" in state:
        raise ValueError(f"selection={options.selection!r} scales or repeats rows: not for compact mode")
    state["indices"] = state["indices"].to(layer.chosen.device)
    if layer.synced.late:
        layer.write_back()
    layer.select(state["indices"])


def _explore_other_rows(every: list[Trained], options: Options) -> None:
    """Draw the rows that layers explore in the coming step, and gather their values."""
    draws = Draws(options.fused)
    alike: dict[tuple[Any, ...], list[tuple[CompactLayer, Tensor, tuple[int, int, int], ExploredViews]]] = {}
    for layer, state, position, _, views in every:
        if not _draws_again(layer, state):
            continue
        key = options.seed, position, state["step"]
        own: dict[str, Any] = layer._parameters | layer._buffers  # past __getattr__, which is slow
        weight, active, chosen = own["weight"], own["active"], own["chosen"]
        places = weight, layer.weight_axis(layer.dim), active, layer.dim, chosen, layer.rank
        if weight.ndim > 2 or not draws.add(*places, draw_key(*key)):
            selected, views = state["indices"], views or ExploredViews.of(layer)
            numbers = layer.shape[layer.dim], chosen.shape[0] - layer.rank, layer.experts
            alike.setdefault((selected.device, len(selected), *numbers), []).append((layer, selected, key, views))
    draws.run()
    for (_, _, size, count, experts), of_one_kind in alike.items():
        layers, selected_rows, keys, views_of_each = zip(*of_one_kind, strict=True)
        explore(layers, draw_explored_of_each(selected_rows, size, count, keys, experts), views_of_each)


def drawn_beside(selected: Tensor, layer: CompactLayer, key: tuple[int, int, int]) -> Tensor:
    """The rows that a layer explores beside those selected; ``key`` is seed, position and step."""
    return draw_explored(selected, layer.shape[layer.dim], layer.explored.numel(), *key, layer.experts)


def _draws_again(layer: CompactLayer, state: State) -> bool:
    """Whether a layer explores other rows in the coming step than its conversion has drawn."""
    return bool(layer.reach and state["step"])
