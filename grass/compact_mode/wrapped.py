"""A conversion that comes too late: DDP has taken note of the parameters that there were."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that DDP has wrapped, as Lightning does before it calls ``configure_optimizers``.

    Raises:
        RuntimeError: a ``DistributedDataParallel`` alive holds parameters of the model.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = {id(p) for p in model.parameters() if p.requires_grad}
    if _is_held(own) and gc.collect() is not None and _is_held(own):  # a wrapper may only wait for its collection
        raise RuntimeError(
            "Too late to convert: DistributedDataParallel has wrapped this model and would not reduce the gradients of "
            "the active rows. Call grass.compact() before; in Lightning, in the module's __init__ or configure_model"
        )


def _is_held(parameters: set[int]) -> bool:
    """Whether DDP reduces any of these parameters, by ``id``."""
    return any(id(p) in parameters for wrapper in _wrappers() for p in wrapper._module_parameters)


def _wrappers() -> Iterator[Any]:
    """All DDP wrappers alive. A wrapped model does not know its wrapper."""
    return (it for it in gc.get_objects() if issubclass(type(it), DistributedDataParallel))
