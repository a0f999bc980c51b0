"""Random numbers that depend only on their key: the same on every rank and in a resumed run, with no state to save."""

from __future__ import annotations

import hashlib

import torch


def selection_generator(seed: int, parameter: int, refresh: int) -> torch.Generator:
    """A fresh CPU generator for the rows that one refresh of a parameter selects."""
    return draw_generator(seed, parameter, refresh)


def cycle_generator(seed: int, parameter: int, cycle: int) -> torch.Generator:
    """A fresh CPU generator for an order of all rows, of which several refreshes of a parameter select in turn."""
    return draw_generator(seed, parameter, "cycle", cycle)


def sketch_generator(seed: int, width: int, refresh: int) -> torch.Generator:
    """A fresh CPU generator for the signs of a sketch; weights of one width share them.

    The width takes the place of the parameter, negative so that the key is never that of a selection.
    """
    return draw_generator(seed, -width, refresh)


def draw_generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator for a key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
