"""Packages that Grass uses where they are there, but does not require."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its name, as ``"matplotlib.figure"``.
        what: what needs it, for the message.

    Raises:
        ImportError: it cannot be imported; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ImportError(f"{what} needs {package}: pip install {package} ({error})") from error
