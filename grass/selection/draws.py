"""Random numbers that depend on nothing but their key: the same on every rank and in a resumed run."""

from __future__ import annotations

import hashlib

import torch


def selection_generator(seed: int, parameter: int, refresh: int) -> torch.Generator:
    """A fresh CPU generator for one draw: the same on every rank and after every resume, with no state to save."""
    return draw_generator(seed, parameter, refresh)


def draw_generator(*key: int | str) -> torch.Generator:
    """A CPU generator that depends on nothing but its key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
