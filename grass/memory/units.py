"""Sizes of memory in words, ``40GB`` is 40 * 10^9 bytes and ``40GiB`` 40 * 2^30; and counts, ``26B`` is 26 * 10^9."""

from __future__ import annotations

import argparse
import re

UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}
"""A GPU sold as 40 GB has about 42.5 * 10^9 bytes: what fits ``40GB`` fits it with room for the CUDA context."""


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``40GB``, ``22.5GiB`` or ``500 mb``; units in upper or lower case.

    Raises:
        ValueError: there is no unit, another unit, or no positive number.
    """
    match, units = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text), {u.lower(): n for u, n in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(
            f"Invalid size {text!r}: must be a number with one of the units {', '.join(UNITS)}, as in 40GB"
        )
    nbytes = round(float(match[1]) * units[match[2].lower()])
    if nbytes == 0:
        raise ValueError(f"Invalid size {text!r}: must be > 0")
    return nbytes


def size(text: str) -> int:
    """:func:`parse_bytes` for a flag of a command."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
"""Suffixes of counts, in lower case."""


def count(text: str) -> float:
    """A positive count for a flag of a command: ``26B``, ``300M`` or ``5e9``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text.lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"Invalid count {text!r}: must be > 0, as in 300M, 26B or 5e9")
    return float(match[1]) * COUNTS[match[2]]


def format_bytes(nbytes: float) -> str:
    """Bytes in GB (10^9)."""
    return f"{nbytes / 10**9:,.2f} GB"
