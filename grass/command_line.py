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
    """An integer, or with a point or an exponent a float."""
    return float(text) if set(text) & set(".e") else int(text)
