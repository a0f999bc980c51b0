"""Which configurations have a plan, and why others have none."""

from __future__ import annotations

from typing import Any

from torch import nn

from grass.compact_mode.conversion import convertible
from grass.targets import is_linear


def check_kind(config: Any) -> None:
    """Refuse models that are no stack of decoder blocks, or whose memory depends on the data.

    Raises:
        ValueError: naming ``model_type`` and the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder and a decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model for it"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        reason = "an encoder; with is_decoder=true in its configuration it is planned as a decoder"
    elif config.get_text_config() is not config:
        reason = "a text model inside a larger one: give the text model's own configuration"
    elif getattr(config, "num_attention_heads", None) is None:
        reason = "no stack of attention blocks"
    if reason:
        raise ValueError(f"No plan for model_type={config.model_type!r}: {reason}")


def check_blocks(config: Any, blocks: nn.ModuleList) -> None:
    """Refuse models whose blocks differ, or have nothing that Grass converts.

    Raises:
        ValueError: naming ``model_type`` and the blocks.
    """
    if not any(convertible(name, module) for name, module in blocks.named_modules() if is_linear(module)):
        raise ValueError(
            f"No plan for model_type={config.model_type!r}: its blocks have no nn.Linear or Conv1D that Grass converts"
        )
    shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in blocks]
    other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(
            f"No plan for model_type={config.model_type!r}: its blocks 0 and {other} differ in their parameters"
        )


def learned_positions(model: Any) -> int | None:
    """The longest sequence that a learned embedding of positions allows; ``None`` where there is none."""
    longest = getattr(model.config, "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    return longest if longest and any(table.num_embeddings >= longest for table in tables) else None
