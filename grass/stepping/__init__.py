"""How :class:`grass.GrassAdamW` steps the parameters of one group: in one of three ways.

=============  ==================================================================
``plain``      at full rank, as torch's AdamW does; small ones as float32 masters
``projected``  by rows chosen from the full gradient (dense mode)
``active``     by rows that are parameters themselves (compact mode)
=============  ==================================================================

The last two end in the same arithmetic on selected rows, :mod:`grass.stepping.backends`.
"""

from __future__ import annotations

from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.parallel.versions import count_writes
from grass.stepping.compact import step_active
from grass.stepping.dense import step_projected
from grass.stepping.group import GroupStep, Member
from grass.stepping.plain import is_rounded, step_device, step_plain, step_rounded

__all__ = ["GroupStep", "Member", "step_device", "step_group"]


def step_group(
    step: GroupStep, members: list[Member], layers: dict[int, CompactLayer], given_norms: dict[Tensor, Tensor]
) -> list[Tensor]:
    """Step those parameters of a group that have gradients.

    Args:
        step: what they share.
        members: the parameters with their gradients and states.
        layers: converted layers by the ``id`` of their active rows.
        given_norms: norms that replace those of a parameter's gradient in a selection; used ones are removed.

    Returns:
        The rows of every weight that has selected rows in this step.
    """
    active = [m for m in members if id(m.parameter) in layers]
    weights = [layers[id(m.parameter)].weight for m in active if not layers[id(m.parameter)].synced.late]
    count_writes([*(m.parameter for m in members), *weights])
    dense = [m for m in members if id(m.parameter) not in layers] if active else members
    projected = [m for m in dense if step.options.projects(m.parameter)]
    plain = [m for m in dense if not step.options.projects(m.parameter)]
    chosen = step_projected(step, projected, given_norms)
    for member in plain:
        if is_rounded(member.parameter, step.group):
            step_rounded(step, member)
    step_plain(step, [m for m in plain if not is_rounded(m.parameter, step.group)])
    return chosen + step_active(step, [(m, layers[id(m.parameter)]) for m in active])
