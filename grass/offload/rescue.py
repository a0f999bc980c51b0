"""What is left of a step that has failed: the values of each parameter before the step or after it, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.device_step import DeviceStep
from grass.offload.host_copies import HostCopy
from grass.offload.host_storage import is_on_host, mark_on_host
from grass.offload.progress import Stage
from grass.offload.tasks import Task
from grass.stepping.optimizer_step import OptimizerStep

logger = logging.getLogger("grass")


@dataclass
class Losses:
    """What a failed step has destroyed.

    Attributes:
        fault: what went wrong.
        states: the parameters whose state was left half changed.
        values: those whose stepped values cannot be brought to the device.
    """

    fault: str = ""
    states: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def check_values(self) -> None:
        """Raise ``RuntimeError`` if values of parameters are lost."""
        _check("values", self.values, self.fault)

    def check_states(self) -> None:
        """Raise ``RuntimeError`` if state, or values that belong to it, are lost."""
        self.check_values()
        _check("optimizer state", self.states, self.fault)


def rescue(
    steps: dict[Tensor, HostCopy | DeviceStep],
    ends: dict[Tensor, Task],
    link_of: Callable[[torch.device], Link],
    fault: str,
) -> Losses:
    """Bring to its place what was stepped before the fault.

    Args:
        steps: of the parameters. No thread works on them any more, except on those of a stuck copy.
        ends: the last task of each of them that has not arrived.
        link_of: the link to a device.
        fault: what went wrong.
    """
    losses = Losses(fault)
    for p in ends:
        step = steps[p]
        try:
            with torch.inference_mode(False), torch.no_grad():
                step.rescue(link_of(p.device))
        except Exception as error:
            logger.warning("Grass: %s could not be brought to its place: %s", ends[p].name, repr(error))
        if step.stage is Stage.STEPPING:
            losses.states.append(ends[p].name)
        elif step.stage not in (Stage.QUEUED, Stage.ARRIVED):
            losses.values.append(ends[p].name)
    logger.warning(
        "Grass: a step has failed. Of %d parameters, %d have the values before it, %d those after it, %d are lost.",
        len(ends),
        sum(steps[p].stage is Stage.QUEUED for p in ends),
        sum(steps[p].stage is Stage.ARRIVED for p in ends),
        len(losses.states) + len(losses.values),
    )
    return losses


def forget_steps(parameters: Iterable[Tensor]) -> None:
    """Let nobody wait for steps that do not come."""
    for p in parameters:
        if is_on_host(p):
            mark_on_host(p)


def restorer(whole: OptimizerStep) -> Callable[[], None]:
    """Gives back to the model what the preparation of a step takes from it, for the case that it is interrupted."""
    norms = dict(whole.given_norms)
    sketches = [(layer, layer.sketch, layer.signs, layer.held_sketch) for layer in whole.layers.values()]

    def restore() -> None:
        whole.given_norms.update(norms)
        forget_steps(whole.states)
        for layer, *sketch in sketches:
            layer.sketch, layer.signs, layer.held_sketch = sketch
            layer.mark_synced()  # weight and active rows still agree, whatever their versions say

    return restore


def _check(what: str, lost: list[str], fault: str) -> None:
    if lost:
        raise RuntimeError(f"A step has failed and destroyed {what}, of {', '.join(lost)}: load a checkpoint. {fault}")
