"""What the commands of this package share: their parser, and types of flags."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class ShortErrors:
    """Makes a parser print an error in one line, without the usage of all flags before it."""

    prog: str

    def error(self, message: str) -> NoReturn:
        """Print the message on stderr and exit with status 2."""
        print(f"{self.prog}: error: {message} (--help shows all flags)", file=sys.stderr)
        sys.exit(2)


class ArgumentParser(ShortErrors, argparse.ArgumentParser):
    """``argparse.ArgumentParser`` with short errors, and with the description as it is written."""

    def __init__(self, description: str | None, **keywords: Any) -> None:
        super().__init__(description=description, formatter_class=HelpFormatter, **keywords)


def number(text: str) -> int | float:
    """An integer; with a point, an exponent or a stroke, as in ``1/8``, a float."""
    return share(text) if set(text) & set(".e/") else int(text)


def share(text: str) -> float:
    """A float, also written as a fraction such as ``1/8``."""
    above, stroke, below = text.partition("/")
    if stroke and not int(below):
        raise ValueError(f"Invalid fraction {text!r}: divides by zero")
    return int(above) / int(below) if stroke else float(text)
