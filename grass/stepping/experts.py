"""Experts: a parameter ``(E, m, n)`` is a batch of matrices, whose rows are chosen and stepped matrix by matrix.

The state is that of one matrix: the experts side by side along the dimension in which rows are selected. With ``dim=0``
it has ``E m`` rows of ``n`` values, with ``dim=1`` ``E n`` columns of ``m``. Equally many are selected of each expert,
so expert ``e`` has the places from ``e r`` on in ``indices``, moments and step counts.

An expert that no token was sent to has a gradient of zeros. It rests: its rows, moments and step counts stay.
"""

from __future__ import annotations

from torch import Tensor

from grass.state.refresh import have_tokens
from grass.state.schema import MOMENTS, State


def with_tokens(grad: Tensor, like: Tensor) -> list[int]:
    """The experts that :func:`grass.state.refresh.have_tokens` finds."""
    seen: list[int] = have_tokens(grad, like).nonzero().flatten().tolist()
    return seen


def count_step(state: State, seen: list[int], experts: int) -> None:
    """Count a step of these experts."""
    state["step"] += 1
    state["row_steps"].view(experts, -1)[seen] += 1.0


def state_of(state: State, expert: int, experts: int, dim: int) -> State:
    """The state of one expert; its tensors are views."""
    rank = state["indices"].numel() // experts
    own = {key: state[key].narrow(dim, expert * rank, rank) for key in MOMENTS}
    part = slice(expert * rank, (expert + 1) * rank)
    return {**state, **own, "indices": state["indices"][part], "row_steps": state["row_steps"][part]}


def put_moments(state: State, own: State, expert: int, experts: int, dim: int) -> None:
    """Write the moments of one expert back, where they are copies."""
    rank = state["indices"].numel() // experts
    for key in MOMENTS:
        part = state[key].narrow(dim, expert * rank, rank)
        if part.data_ptr() != own[key].data_ptr():
            part.copy_(own[key])


def place_of(position: int, expert: int) -> int:
    """What stands for the parameter's place in the random keys of one expert, so that experts round differently."""
    return position + ((expert + 1) << 24)
