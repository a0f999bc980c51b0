"""Which modules visit the device."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from grass.streaming.units import find_units


def layer(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Stacks(nn.Module):
    """Two stacks of layers, a short list beside them, and layers with lists inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.encoder = nn.ModuleList(layer() for _ in range(3))
        self.decoder = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([layer(), layer()])}) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])


def test_lists_that_hold_many_parameters() -> None:
    assert list(find_units(Stacks(), None)) == [f"{stack}.{i}" for stack in ("encoder", "decoder") for i in range(3)]


def test_a_list_in_a_list() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(layer() for _ in range(5))), nn.Linear(8, 4))
    assert list(find_units(model, None)) == [f"1.{i}" for i in range(5)]
    assert list(find_units(nn.Sequential(*(layer() for _ in range(5))), None)) == [str(i) for i in range(5)]


def test_names() -> None:
    assert list(find_units(Stacks(), ["decoder", "embedding"])) == [*(f"decoder.{i}" for i in range(3)), "embedding"]


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ("decoder", TypeError, "must be names of modules"),
        ([1], TypeError, "must be names of modules"),
        (["nowhere"], ValueError, "no such module"),
        (["decoder", "decoder.0.experts"], ValueError, "must not lie in each other"),
        ([], ValueError, "units="),
    ],
)
def test_wrong_names(names: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_units(Stacks(), names)


def test_no_list() -> None:
    with pytest.raises(ValueError, match="name the modules"):
        find_units(nn.Linear(4, 4), None)
