"""What logits and their gradients take, of any causal language model."""

from __future__ import annotations

from grass.memory.architecture import Architecture
from grass.memory.setting import Setting
from grass.memory.tracing import Traced


def traced(model: Architecture, setting: Setting, *, linears: bool, others: bool = True) -> Traced:
    """What a block saves whose matrices (``linears``), norms and biases (``others``) train or do not, and all else."""
    return model.tracer(setting.batch_size, setting.seq_len, setting.dtype, linears=linears, others=others)


def loss_memory(model: Architecture, setting: Setting, whole: float, head_trains: bool) -> float:
    """Most bytes of logits and of gradients with respect to them and to the head, while the loss is differentiated.

    Those of ``whole`` logits are traced; for LLaMA they are three float32 copies. In chunks of ``c`` tokens: three of
    ``c V`` beside the head's gradient so far, or that gradient, the chunk's, and their sum.
    """
    if not setting.chunk_tokens:
        return whole
    e, chunk = setting.dtype.itemsize, min(setting.chunk_tokens, setting.tokens)
    gradient = model.head * e if head_trains else 0
    so_far = gradient if chunk < setting.tokens else 0
    return max(3 * 4 * chunk * model.vocab + so_far, gradient + 2 * so_far + chunk * model.vocab * e)
