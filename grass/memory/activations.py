"""What forward saves for backward, per decoder layer and around them, in bytes.

For the attention of torch's ``scaled_dot_product_attention`` without a mask and transformers' RMS norms. With ``T``
tokens, ``e`` bytes per element, ``h`` hidden, ``f`` intermediate, ``q`` and ``k`` numbers in all query and key heads:

- a norm over ``w`` numbers saves ``T w (4 + e) + 4 T``: a float32 copy, the normalised input, the root;
- attention saves queries, keys, values and output, ``T (2q + 2k) e``, and ``4 T`` per head;
- the MLP saves gate, its activation, and up, ``3 T f e``;
- what linear layers save of their inputs depends on the method (:mod:`grass.memory.methods`).
"""

from __future__ import annotations

from grass.memory.architecture import Architecture
from grass.memory.setting import Setting


def layer_activations(model: Architecture, setting: Setting, inputs: int) -> int:
    """Bytes that one decoder layer saves, of which ``inputs`` are inputs of its linear layers."""
    tokens, e = setting.tokens, setting.dtype.itemsize
    norms = 2 * _norm(model.hidden, 1, setting)
    if model.qk_norm:
        norms += _norm(model.query_width, model.heads, setting) + _norm(model.kv_width, model.kv_heads, setting)
    attention = tokens * (2 * (model.query_width + model.kv_width) * e + 4 * model.heads)
    return norms + attention + 3 * tokens * model.intermediate * e + inputs


def layer_input(model: Architecture, setting: Setting) -> int:
    """Bytes of a decoder layer's input: all that checkpointing saves of it."""
    return setting.tokens * model.hidden * setting.dtype.itemsize


def layer_temporaries(model: Architecture, setting: Setting) -> int:
    """Bytes that backward through an MLP holds beside what was saved: gradients of three ``f`` and two ``h`` wide."""
    return setting.tokens * (3 * model.intermediate + 2 * model.hidden) * setting.dtype.itemsize


def end_activations(model: Architecture, setting: Setting) -> int:
    """Bytes saved by the last norm, the head's input, rotary embeddings and token ids."""
    rotary = 2 * setting.seq_len * model.head_dim * setting.dtype.itemsize
    return _norm(model.hidden, 1, setting) + layer_input(model, setting) + rotary + 24 * setting.tokens


def loss_memory(model: Architecture, setting: Setting, head_trains: bool) -> int:
    """Most bytes of logits and of gradients with respect to them and to the head, while the loss is differentiated.

    Whole: three float32 copies of the logits. In chunks of ``c`` tokens: three of ``c V`` beside the head's gradient so
    far, or that gradient, the chunk's, and their sum.
    """
    if not setting.chunk_tokens:
        return 3 * 4 * setting.tokens * model.vocab
    e, chunk = setting.dtype.itemsize, min(setting.chunk_tokens, setting.tokens)
    gradient = model.embedding * e if head_trains else 0
    so_far = gradient if chunk < setting.tokens else 0
    return max(3 * 4 * chunk * model.vocab + so_far, gradient + 2 * so_far + chunk * model.vocab * e)


def _norm(width: int, count: int, setting: Setting) -> int:
    """Of one norm over ``count`` pieces of ``width`` numbers in all; in float32 the copy is the input itself."""
    e = setting.dtype.itemsize
    return setting.tokens * (width * (4 + e) + 4 * count)
