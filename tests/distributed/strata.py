"""One process whose layers have strata, as ranks have them: what training on these ranks is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import grass
from grass.state.strata import STRATUM_KEY
from grass.stepping import dense
from tests.compact_mode.networks import compact_layers

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""In float64 only the order of sums differs."""


class Strata(nn.Module):
    """A linear layer as layers over block columns (``dim=0``: block rows), each with selected rows of its own."""

    def __init__(self, linear: nn.Linear, strata: int, dim: int) -> None:
        super().__init__()
        self.dim, self.blocks, self.bias = dim, nn.ModuleList(), linear.bias
        for part in linear.weight.detach().chunk(strata, dim=dim):
            block = nn.Linear(part.shape[1], part.shape[0], bias=False, dtype=part.dtype)
            block.weight.data.copy_(part)
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 1:
            parts = zip(self.blocks, x.chunk(len(self.blocks), dim=-1), strict=True)
            y = torch.stack([block(part) for block, part in parts]).sum(0)
        else:
            y = torch.cat([block(x) for block in self.blocks], dim=-1)
        return y if self.bias is None else y + self.bias

    def matrix(self) -> Tensor:
        return torch.cat([block.weight.detach() for block in self.blocks], dim=self.dim)


def convert(model: nn.Module, strata: Mapping[str, int], dim: int = 1, **rows: Any) -> None:
    """Convert a plain model in place such that the layers named have as many strata.

    Draws are those of layers without strata, whose places among the trained parameters differ.
    """
    places = _places(model, dim, rows)
    for name, count in strata.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Strata(model.get_submodule(name), count, dim))
    grass.compact(model, dim=dim, **rows)
    layers = compact_layers(model)
    for number, (name, place) in enumerate(places.items()):
        count = strata.get(name, 1)
        for stratum in range(count):
            layer = layers[f"{name}.blocks.{stratum}" if name in strata else name]
            layer.first_draw = rows.get("seed", 0), number + (stratum << 24)
            layer.place = lambda position, key=place + (stratum << 24): key
            layer.restore(*torch.split(layer.draw_first(), layer.counts()))


def _places(model: nn.Module, dim: int, rows: dict[str, Any]) -> dict[str, int]:
    """Each layer's place among the parameters that train, in a conversion without strata, which is undone."""
    grass.compact(model, dim=dim, **rows)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    converted = compact_layers(model)
    grass.expand(model)
    return {name: names.index(f"{name}.active") for name in converted}


@dataclass(frozen=True)
class DenseStrata:
    """How dense mode trains a plain model whose layers :func:`split` has divided.

    Attributes:
        by_rows: names of the parameters of which rows are selected.
        full: names of the others.
        keys: what stands for the place of each of ``by_rows`` in random draws, as where ranks divide the layers.
    """

    by_rows: list[str]
    full: list[str]
    keys: list[int]

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The groups of a :class:`grass.GrassAdamW` with a ``rank``."""
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in self.by_rows]},
            {"params": [named[name] for name in self.full], "rank": None},
        ]

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Draw as the ranks do."""
        whole = dense._stratum

        def keyed(step: Any, member: Any) -> Any:
            return whole(step, member._replace(position=self.keys[member.position]))

        with mock.patch.object(dense, "_stratum", keyed):
            yield


def split(model: nn.Module, strata: Mapping[str, int], dim: int) -> DenseStrata:
    """Divide the layers named of a plain model in place."""
    groups = grass.param_groups(model, 0.25)
    places = [name for group in groups for name, _ in group["params"]]
    full = [name for group in groups if group["rank"] is None for name, _ in group["params"]]
    keys = {name: places.index(name) for name in places if name not in full}
    for name, count in strata.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Strata(model.get_submodule(name), count, dim))
        place = keys.pop(f"{name}.weight")
        keys |= {f"{name}.blocks.{i}.weight": place + i * STRATUM_KEY for i in range(count)}
    return DenseStrata([*keys], full, [*keys.values()])


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The ``state_dict`` of the plain model that a converted one with strata stands for."""
    state = {name: value.clone() for name, value in model.state_dict().items() if ".blocks." not in name}
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Strata)}
    return {**state, **{f"{name}.weight": module.matrix() for name, module in blocks.items()}}
