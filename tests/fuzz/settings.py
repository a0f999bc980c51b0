"""How a model is built, and where a copy of it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import grass
from grass import GrassAdamW, GrassMuon, Offload
from grass.compact_mode.layer import CompactLayer
from tests.fuzz.models import Network

ATTACHED = ("attached", "muon")
"""Modes in which another optimizer trains the active rows."""

ATTACHED_OPTIONS = ("update_interval", "selection", "state_policy", "refresh")


class Attached(torch.optim.AdamW):
    """Another optimizer on active rows; its state dict has the attachment's beside its own."""

    def attach(self, model: nn.Module, **options: Any) -> Attached:
        self.attachment = grass.attach(self, model, **options)
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": super().state_dict(), "attachment": self.attachment.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["optimizer"])
        self.attachment.load_state_dict(state_dict["attachment"])


def _trained(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Active rows and other parameters that train. A weight whose rows have had no gradient yet may require one."""
    layers = [layer for layer in model.modules() if isinstance(layer, CompactLayer)]
    active, frozen = {id(layer.active) for layer in layers}, {id(layer.weight) for layer in layers}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in frozen]
    return [p for p in trained if id(p) in active], [p for p in trained if id(p) not in active]


@dataclass(frozen=True)
class Setting:
    """What both copies have in common."""

    model: str = "chain"
    mode: str = "compact"
    weights: str = "float32"
    rank: int = 2
    explore: int = 2
    dim: int = 1
    dropout: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    fused: bool | None = None

    def build(self) -> Any:
        torch.manual_seed(0)
        model: Any = Network(self.model, self.dropout)
        if self.weights.startswith("bfloat16"):
            model.to(torch.bfloat16)
        self.convert(model)
        return model

    def convert(self, model: nn.Module) -> None:
        if self.mode in ("compact", *ATTACHED):
            dtype = torch.float32 if self.weights == "bfloat16 under float32" else None
            int8 = "int8" if self.weights == "int8" else None
            grass.compact(model, rank=self.rank, explore=self.explore, dim=self.dim, dtype=dtype, weights=int8)

    def optimizer(self, model: nn.Module, offload: Offload | None, seed: int = 0) -> GrassAdamW | GrassMuon | Attached:
        common: dict[str, Any] = {"lr": 3e-2, "offload": offload, "fused": self.fused}
        if self.mode in ATTACHED:
            options: dict[str, Any] = {name: value for name, value in self.options if name in ATTACHED_OPTIONS}
            if self.mode == "muon":
                return GrassMuon(model, lr=1e-2, seed=seed, **options)
            columns, others = _trained(model)
            attached = Attached([{"params": columns}, {"params": others}], lr=1e-2)
            return attached.attach(model, scale=3.0, seed=seed, **options)
        if self.mode == "full":
            return GrassAdamW([p for p in model.parameters() if p.requires_grad], **common)
        if self.mode == "dense":
            options = {"dim": self.dim, "explore": self.explore, "seed": seed, **dict(self.options)}
            return GrassAdamW(grass.param_groups(model, rank=self.rank, **options), **common)
        return GrassAdamW(model, seed=seed, **common, **dict(self.options))


@dataclass(frozen=True)
class Place:
    """Where a copy lies: how it is streamed and how it is offloaded, and the device that computes."""

    stream: tuple[tuple[str, Any], ...] | None = None
    offload: tuple[tuple[str, Any], ...] | None = None
    device: str = "cpu"

    def plain(self) -> Place:
        """Where the copy lies that this one is compared with: only float32 masters need offload."""
        masters = dict(self.offload or ()).get("masters")
        return Place(None, (("masters", True), ("overlap", False)) if masters else None, self.device)

    def offloaded(self, directory: Path) -> Offload | None:
        return None if self.offload is None else Offload(**in_files(directory, self.offload))


def in_files(directory: Path, options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {**dict(options), **({"path": directory} if dict(options).get("path") else {})}


def streamed_in_files(directory: Path, options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    others = {key: value for key, value in options if key != "path"}
    return {**others, "offload": Offload(path=directory if dict(options).get("path") else None)}
