"""What is left of a step that has failed: the values of each parameter before the step or after it, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.host_storage import is_on_host, mark_on_host
from grass.offload.progress import Stage
from grass.offload.record import Record
from grass.stepping.optimizer_step import OptimizerStep

logger = logging.getLogger("grass")


def rescue(records: list[Record], link_of: Callable[[torch.device], Link]) -> None:
    """Bring to its place what was stepped before the fault, and note what is lost.

    Args:
        records: of the parameters that have not arrived. No thread works on them any more, except on those of a stuck
            copy.
        link_of: the link to a device.
    """
    arrived = 0
    for record in records:
        step = record.by
        assert step is not None
        try:
            with torch.inference_mode(False), torch.no_grad():
                step.rescue(link_of(record.parameter.device))
        except Exception as error:
            logger.warning("Grass: %s could not be brought to its place: %s", record.name, repr(error))
        if step.stage is Stage.STEPPING:
            record.lost = "state"
        elif step.stage not in (Stage.QUEUED, Stage.ARRIVED):
            record.lost = "values"
        arrived += step.stage is Stage.ARRIVED
    lost = sum(record.lost is not None for record in records)
    logger.warning(
        "Grass: a step has failed. Of %d parameters, %d have the values before it, %d those after it, %d are lost.",
        len(records),
        len(records) - arrived - lost,
        arrived,
        lost,
    )


def check_values(records: Iterable[Record], fault: str | None) -> None:
    """Raise ``RuntimeError`` if values of parameters are lost, after this fault."""
    _check("values", [record.name for record in records if record.lost == "values"], fault)


def check_states(records: Iterable[Record], fault: str | None) -> None:
    """Raise ``RuntimeError`` if state, or values that belong to it, are lost."""
    records = list(records)
    check_values(records, fault)
    _check("optimizer state", [record.name for record in records if record.lost == "state"], fault)


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


def _check(what: str, lost: list[str], fault: str | None) -> None:
    if lost:
        raise RuntimeError(f"A step has failed and destroyed {what}, of {', '.join(lost)}: load a checkpoint. {fault}")
