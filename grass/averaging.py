"""Averages of weights (EMA, SWA) of a converted model.

A converted layer holds its values twice, in the weight and in the parameter ``active``, whose columns change in every
step. The average of ``active`` over steps therefore means nothing; that of the weight does. Codes of 8 bits have no
average either, because their scales change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from grass.compact_mode.conversion import expand
from grass.int8 import plain_state_dict
from grass.parallel.shards import is_sharded
from grass.private_names import without_compile


class AveragedModel(swa_utils.AveragedModel):
    """``torch.optim.swa_utils.AveragedModel`` for models in compact mode, and for any other.

    ``module`` is a plain copy of the model, without Grass. :meth:`update_parameters` averages the weights as they are
    after the last step: it decodes 8-bit weights, and waits for steps on the host. Parameters and buffers are paired by
    name. To train on from the average, load it; to evaluate the converted model with it, load the model's own
    ``state_dict`` again afterwards, which gives active columns that are more precise than it their values again::

        averaged = grass.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        for batch in data:
            ...
            optimizer.step()
            averaged.update_parameters(model)
        averaged.module.save_pretrained("averaged")
        model.load_state_dict(averaged.module.state_dict())

    Args:
        model: converted or not; DDP's and ``torch.compile``'s wrappers are taken off.
        device: where the averages are; ``None``: where the model is.
        avg_fn: as in torch's class, as are ``multi_avg_fn`` and ``use_buffers``. Without either, all steps weigh the
            same.
        multi_avg_fn: averages a list of tensors at once.
        use_buffers: average the buffers too instead of copying them.
        dtype: least precision of the averages, and of buffers. A step of an average is often smaller than the spacing
            of bfloat16, so that averages of this type would not move. ``None``: that of the weights.

    Raises:
        ValueError: the model is sharded; or in :meth:`update_parameters`, its parameters are not those of the copy.
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
        *,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        model = _unwrapped(model)
        if any(is_sharded(p) for p in model.parameters()):
            raise ValueError("AveragedModel takes whole parameters, got DTensors: average gathered state dicts instead")
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        expand(self.module)
        for values in (*self.module.parameters(), *self.module.buffers()):
            if dtype is not None and values.is_floating_point():
                values.data = values.data.to(torch.promote_types(values.dtype, dtype))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average in the weights of the model as they are now."""
        model = _unwrapped(model)
        values = {**dict(model.named_buffers()), **plain_state_dict(model)}
        parts = (_values_of(own, values) for own in (self.module.named_parameters(), self.module.named_buffers()))
        super().update_parameters(_Values(*parts))  # type: ignore[arg-type]


def _values_of(averages: Iterator[tuple[str, Tensor]], values: dict[str, Tensor]) -> list[Tensor]:
    """The values that belong to averages, in their order and precision."""
    own = []
    for name, average in averages:
        if name not in values or values[name].shape != average.shape:
            found = f"has shape {tuple(values[name].shape)}" if name in values else "has none of this name"
            raise ValueError(f"The average {name!r} has shape {tuple(average.shape)}, but the model {found}")
        own.append(values[name].to(average.dtype))
    return own


class _Values(NamedTuple):
    """What torch's class reads of a model."""

    every_parameter: list[Tensor]
    every_buffer: list[Tensor]

    def parameters(self) -> list[Tensor]:
        return self.every_parameter

    def buffers(self) -> list[Tensor]:
        return self.every_buffer


def _unwrapped(model: Any) -> nn.Module:
    """The model without the wrappers of DDP and ``torch.compile``."""
    while isinstance(model, DistributedDataParallel) or model is not without_compile(model):
        model = model.module if isinstance(model, DistributedDataParallel) else without_compile(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return model
