"""Architectures by name: LLaMA sizes, Hugging Face models, configuration files."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.memory.architecture import Architecture

VOCABULARY = 32_000
"""Tokens that the names of LLaMA sizes count."""

SIZES = frozenset(
    {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer", "n_head"}
)
"""Fields of a configuration that, where they are there, have to be positive integers."""


def load_architecture(name: str) -> Architecture:
    """A size such as ``13b``, or anything ``AutoConfig.from_pretrained`` takes: a model's name, a directory, a file.

    No code of the model's is run.

    Raises:
        ImportError: transformers is not installed.
        ValueError: nothing of this name is found, or it is a kind of model that has no plan.
    """
    transformers = optional("transformers", "The plan of a model")
    from grass.memory.llama import LLAMA_SHAPES, llama_config

    if (size := name.strip().lower()) in LLAMA_SHAPES:
        return Architecture.from_config(llama_config(size, vocab_size=VOCABULARY, max_seq_len=2048))
    exists, close = Path(name).exists(), difflib.get_close_matches(size, LLAMA_SHAPES, n=1)
    allowed = (
        f"must be one of {', '.join(LLAMA_SHAPES)}, a model of the Hugging Face hub by its name, a directory that "
        "holds a config.json, or such a file"
    )
    if close and not exists:
        raise ValueError(f"No model {name!r}: did you mean {close[0]}? It {allowed}")
    try:
        _check_sizes(transformers.PretrainedConfig.get_config_dict(name)[0])
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # network, JSON, unknown kinds, fields that transformers refuses
        what = f"Invalid configuration {name!r}" if exists else f"No model {name!r}: {allowed}"
        raise ValueError(f"{what}: {_summary(error)}") from error
    return Architecture.from_config(config)


def _check_sizes(fields: dict[str, Any]) -> None:
    for name in SIZES & fields.keys():
        if type(fields[name]) is not int or fields[name] < 1:
            raise ValueError(f"{name}={fields[name]!r} must be an integer >= 1")


def _summary(error: Exception) -> str:
    """The first lines that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return kind + " ".join(lines[:3])
