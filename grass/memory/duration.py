"""How long training takes: floating-point operations of a token, and days for a number of tokens."""

from __future__ import annotations

from grass.memory.architecture import Architecture
from grass.memory.methods import active_sizes
from grass.memory.setting import Setting

SECONDS_OF_A_DAY = 86_400


def flops_per_token(method: str, model: Architecture, setting: Setting) -> float:
    """Floating-point operations of forward and backward for one token; attention's own products are not counted.

    A product with a weight of N elements takes 2 N: once in forward, again where backward repeats a checkpointed
    block, once for the gradient of its input, and 2 N' for the gradient of the N' elements that train. The repeated
    forward of a block ends before its last product, whose output nobody saves, unless Grass has converted the layer.
    """
    used = [linear.used * linear.m * linear.n for linear in model.linears]
    others = model.other_used
    repeated = others + sum(used if method in COMPACT else used[:-1]) if setting.checkpointing else 0
    trained = _trained_elements(method, model, setting) + (0 if method in ADAPTERS else others)
    blocks = 2 * model.layers * (2 * (sum(used) + others) + repeated + trained)
    return blocks + (4 if method in ADAPTERS else 6) * model.head


def days(method: str, model: Architecture, setting: Setting, tokens: float, tflops: float) -> float:
    """Days that ``tokens`` take at ``tflops`` 10^12 operations a second, which a training run has to reach on average.

    The optimizer's step is taken to be free, so the estimate is low for small batches and offloaded steps.
    """
    return tokens * flops_per_token(method, model, setting) / (tflops * 1e12) / SECONDS_OF_A_DAY


ADAPTERS = ("LoRA", "QLoRA")
"""Methods that train no weight of the model, its head neither."""

COMPACT = ("Grass", "Grass int8")
"""Methods that compute gradients of active columns only."""


def _trained_elements(method: str, model: Architecture, setting: Setting) -> float:
    """Elements of a block's weights whose gradients one token contributes to."""
    if method in ADAPTERS:
        return sum(linear.used * setting.lora_rank * (linear.m + linear.n) for linear in model.linears)
    if method not in COMPACT:
        return sum(linear.used * linear.m * linear.n for linear in model.linears)
    rows = zip(active_sizes(model, setting), model.linears, strict=True)
    return sum((r + q) * width * linear.used / linear.experts for (r, q, width), linear in rows)
