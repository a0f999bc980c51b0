"""Architectures by name: LLaMA sizes, Hugging Face models, configuration files."""

from __future__ import annotations

from grass.memory.architecture import Architecture

VOCABULARY = 32_000
"""Tokens that the names of LLaMA sizes count."""


def load_architecture(name: str) -> Architecture:
    """A size such as ``13b``, or anything ``AutoConfig.from_pretrained`` takes: a model's name, a directory, a file.

    No code of the model's is run.

    Raises:
        ImportError: transformers is not installed.
        ValueError: nothing of this name is found, or it is a kind of model that has no plan.
    """
    try:
        from transformers import AutoConfig

        from grass.training.models import LLAMA_SHAPES, llama_config
    except ImportError as error:
        raise ImportError(f"Configurations need transformers: pip install grass-torch[hf] ({error})") from error
    if name in LLAMA_SHAPES:
        return Architecture.from_config(llama_config(name, vocab_size=VOCABULARY, max_seq_len=2048))
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        sizes = ", ".join(LLAMA_SHAPES)
        raise ValueError(
            f"No model {name!r}: not one of {sizes}, nor a configuration by name or file: {error}"
        ) from error
    return Architecture.from_config(config)
