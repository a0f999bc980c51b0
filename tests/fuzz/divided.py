"""What a user may do between two steps with a model that ``parallelize_module`` has divided, and with one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import grass
from grass import GrassAdamW
from tests.distributed.parallel_2d.decoders import decoder, ids, whole, whole_gradients
from tests.distributed.strata import convert, split, whole_state
from tests.distributed.training import assert_close
from tests.distributed.world import run_world
from tests.fuzz.grid import CLOSE, GridRun
from tests.fuzz.lockstep import Action
from tests.fuzz.run import WRITES

PARTS = 2
"""Ranks of tensor parallelism, and of FSDP2 beside it."""
LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)
STYLES: dict[str, Any] = {
    "colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Each takes and gives whole activations, so that every layer may have either."""
SELECTED = {"colwise": 0, "rowwise": 1}
"""The dimension along which each divides a weight."""


@dataclass(frozen=True)
class Divided:
    """How each kind of layer is divided (``plain``: not at all), and how the model is converted and trained."""

    styles: tuple[str, ...]
    model: str = "llama"
    compact: bool = True
    sharded: bool = False
    dim: int = 1
    rank: float = 0.25
    explore: float = 0.25
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return PARTS * (PARTS if self.sharded else 1)

    def layers(self) -> dict[str, str]:
        """Names of the layers that are divided, with the style of each."""
        kinds = zip(LAYERS, self.styles, strict=True)
        return {f"model.layers.{i}.{name}": style for name, style in kinds if style != "plain" for i in range(2)}


class OneProcess(GridRun):
    """The model in one process, whose layers have the strata that ranks would have."""

    setting: Divided  # type: ignore[assignment]

    def __init__(self, setting: Divided) -> None:
        self.setting, self.saved, self.device = setting, {}, "cpu"
        self.build(decoder(setting.model), 0)
        self.begin()

    def rows(self, seed: int) -> dict[str, Any]:
        return {"rank": self.setting.rank, "explore": self.setting.explore, "dim": self.setting.dim, "seed": seed}

    def build(self, plain: nn.Module, seed: int) -> None:
        """Convert a plain model, or divide its layers for dense mode."""
        strata = {name: PARTS for name, style in self.setting.layers().items() if SELECTED[style] == self.setting.dim}
        if self.setting.compact:
            convert(plain, strata, **self.rows(seed))
        else:
            self.strata = split(plain, strata, self.setting.dim)
        self.model: Any = plain

    def begin(self) -> None:
        options: dict[str, Any] = {"lr": 1e-2, **dict(self.setting.options)}
        params = self.model
        if not self.setting.compact:
            params = self.groups()
            options |= self.rows(0)
        self.optimizer = GrassAdamW(params, **options)

    def groups(self) -> list[dict[str, Any]]:
        """The groups of dense mode."""
        return self.strata.groups(self.model)

    def draws(self) -> Any:
        """While this is open, dense mode draws as the ranks do."""
        return nullcontext() if self.setting.compact else self.strata.draws()

    def share(self, tokens: Tensor) -> Tensor:
        """The part of a batch that is this process's."""
        return tokens

    def loss(self, number: int, smoothing: float = 0.0) -> Tensor:
        tokens = self.share(ids(number))
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=smoothing)

    def backward(self, number: int) -> Any:
        loss = self.loss(number)
        loss.backward()
        return self.mean(loss.detach())

    def backward_of_logits(self, number: int) -> Any:
        loss = self.loss(number, smoothing=0.1)
        loss.backward()
        return self.mean(loss.detach())

    def forward_only(self, number: int) -> Any:
        return self.mean(self.loss(number).detach())

    def mean(self, loss: Tensor) -> Tensor:
        """Over the processes that have data of their own."""
        return loss

    def clip(self, limit: float) -> Tensor:
        """Clip what trains in the divided layers; torch does not mix them with the gradients of others."""
        every = [p for name, p in self.model.named_parameters() if name.startswith(tuple(self.setting.layers()))]
        norm: Any = nn.utils.clip_grad_norm_(every, limit)
        return whole({"norm": norm})["norm"]

    def train(self, number: int, steps: int, clip: float | None, batches: int) -> Any:
        seen = []
        for step in range(number, number + steps):
            seen += [self.backward(step + 7 * i) for i in range(batches)]
            seen += [] if clip is None else [self.clip(clip)]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(seen)

    def named(self, number: int) -> list[nn.Parameter]:
        """A parameter of the divided model, or the blocks that stand for it."""
        blocks: dict[str, list[nn.Parameter]] = {}
        for name, p in self.model.named_parameters():
            blocks.setdefault(plain_name(name), []).append(p)
        return blocks[sorted(blocks)[number % len(blocks)]]

    def write(self, number: int, how: str) -> None:
        """Change a parameter that is not converted: changes of sharded layers by hand are not seen."""
        plain = [
            p for name, p in self.model.named_parameters() if name.startswith(("model.embed", "model.norm", "lm_head"))
        ]
        with torch.no_grad():
            WRITES[how](plain[number % len(plain)])

    def freeze(self, number: int, *, frozen: bool) -> None:
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for p in self.named(number):
            if id(p) in trained:
                p.requires_grad_(not frozen)

    def save(self, *, full: bool) -> None:
        if full:
            get_optimizer_state_dict(self.model, self.optimizer)  # takes a step without gradients before the first one
        super().save(full=False)

    def go_on_as_copy(self) -> None:
        """Without gradients, which torch copies with a ``DTensor`` only."""
        self.model.zero_grad()
        super().go_on_as_copy()

    def expand(self, seed: int) -> None:
        """Undo the conversion and begin again, with other columns."""
        self.again(whole_state(self.model), seed)

    def again(self, state: dict[str, Tensor], seed: int) -> None:
        """Begin with a plain model of this state."""
        plain = decoder(self.setting.model)
        plain.load_state_dict(state)
        if self.model.is_gradient_checkpointing:
            plain.gradient_checkpointing_enable({"use_reentrant": False})
        self.build(plain, seed)
        self.saved = {}
        self.begin()

    def state(self) -> dict[str, Tensor]:
        """All weights, all gradients."""
        return {**whole_state(self.model), **self.gradients()}

    def gradients(self) -> dict[str, Tensor]:
        blocks: dict[str, list[Tensor]] = {}
        for name, grad in whole_gradients(self.model).items():
            blocks.setdefault(plain_name(name), []).append(grad)
        return {
            f"gradient of {name}": torch.cat(parts, self.setting.dim) if len(parts) > 1 else parts[0]
            for name, parts in blocks.items()
        }


def plain_name(name: str) -> str:
    """The name of a parameter of :class:`tests.distributed.strata.Strata` without the number of its block."""
    layer, found, rest = name.partition(".blocks.")
    return f"{layer}.{rest.partition('.')[2]}" if found else name


class DividedRun(OneProcess):
    """The model on the ranks of tensor parallelism, or of FSDP2 beside it."""

    def build(self, plain: nn.Module, seed: int) -> None:
        sizes, names = ((PARTS, PARTS), ("data", "parts")) if self.setting.sharded else ((PARTS,), ("parts",))
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        parallelize_module(
            plain, self.mesh["parts"], {name: STYLES[style]() for name, style in self.setting.layers().items()}
        )
        if self.setting.compact:
            grass.compact(plain, **self.rows(seed))
        if self.setting.sharded:
            placement = grass.distributed.shard_placement_fn(plain) if self.setting.compact else None
            for module in (*plain.model.layers, plain):  # type: ignore[union-attr]
                fully_shard(module, mesh=self.mesh["data"], shard_placement_fn=placement)
        self.model = plain

    def groups(self) -> list[dict[str, Any]]:
        return grass.param_groups(self.model, self.setting.rank)

    def share(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(PARTS)[self.mesh["data"].get_local_rank()] if self.setting.sharded else tokens

    def mean(self, loss: Tensor) -> Tensor:
        if self.setting.sharded:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.mesh["data"].get_group())
            loss /= PARTS
        return loss

    def save(self, *, full: bool) -> None:
        GridRun.save(self, full=full)

    def expand(self, seed: int) -> None:
        if self.setting.sharded or not self.setting.compact:
            self.again(whole(self.model.state_dict()), seed)
            return
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.requires_grad_(True)
        grass.expand(self.model)
        grass.compact(self.model, **self.rows(seed))
        self.saved = {}
        self.begin()

    def state(self) -> dict[str, Tensor]:
        return {**whole(self.model.state_dict()), **self.gradients()}

    def gradients(self) -> dict[str, Tensor]:
        return {f"gradient of {name}": grad for name, grad in whole_gradients(self.model).items()}


def seen(rank: int, setting: Divided, actions: list[Action]) -> list[dict[str, Tensor]]:
    """What each action has returned, and all weights and gradients after it, of the model on its ranks."""
    return done(DividedRun(setting), actions)


def done(run: OneProcess, actions: list[Action]) -> list[dict[str, Tensor]]:
    every = []
    for number, (name, arguments) in enumerate(actions):
        torch.manual_seed(number)
        got = {"seen": getattr(run, name)(**arguments), **run.state()}
        every.append({key: value.clone() for key, value in got.items() if value is not None})
    return every


def as_one_process(setting: Divided, actions: list[Action]) -> None:
    """Do the same in one process and on the ranks; all must have seen the same, and trained alike."""
    run = OneProcess(setting)
    with run.draws():
        expected = done(run, actions)
    for ours in run_world(seen, setting.ranks, setting, actions):
        for (name, arguments), got, wanted in zip(actions, ours, expected, strict=True):
            try:
                assert got.keys() == wanted.keys()
                assert_close(got, wanted, **CLOSE)
            except AssertionError as error:
                raise AssertionError(f"{name} {arguments}: {error}") from error
