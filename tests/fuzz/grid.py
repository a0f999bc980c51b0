"""What a user may do between two steps with a model on a grid of ranks. Methods return what they have seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import grass
from grass import GrassAdamW
from tests.distributed.parallel_2d.decoders import (
    BATCH,
    decoder,
    ids,
    labels_of,
    on_grid,
    plain_loss,
    whole,
    whole_gradients,
)
from tests.distributed.training import assert_close
from tests.fuzz.run import WRITES

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""In float64 only the order of sums differs; steps magnify it where moments are near zero."""
EVALUATIONS: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
FULL = StateDictOptions(full_state_dict=True)


@dataclass(frozen=True)
class OnGrid:
    """How the model is converted and trained; the shape of the grid."""

    shape: tuple[int, ...] = (2, 2)
    mode: str = "compact"  # or "dense", or "full rank"
    rank: float = 0.25
    explore: float = 0.25
    options: tuple[tuple[str, Any], ...] = ()


class GridRun:
    """A model on a grid, with its optimizer."""

    def __init__(self, setting: OnGrid, device: str = "cpu", **grid: Any) -> None:
        self.setting, self.device = setting, device
        self.model = on_grid(decoder().to(device), *setting.shape, **grid)
        self.saved: dict[str, Any] = {}
        self.convert(0)
        self.begin()

    def convert(self, seed: int) -> None:
        if self.setting.mode == "compact":
            grass.compact(self.model, rank=self.setting.rank, explore=self.setting.explore, seed=seed)

    def begin(self) -> None:
        options = {} if self.setting.mode == "full rank" else dict(self.setting.options)
        params: Any = self.model if self.setting.mode == "compact" else self.model.parameters()
        if self.setting.mode == "dense":
            params = grass.param_groups(self.model, self.setting.rank)
            options["explore"] = self.setting.explore
        self.optimizer = GrassAdamW(params, lr=1e-2, **options)

    def ids(self, number: int, batch: int = BATCH) -> Tensor:
        return ids(number, batch).to(self.device)

    def loss(self, number: int) -> Tensor:
        tokens = self.ids(number)
        loss: Tensor = self.model(input_ids=tokens, labels=labels_of(tokens)).loss
        return loss

    def backward(self, number: int) -> Any:
        loss = self.loss(number)
        loss.backward()
        return loss.detach()

    def backward_later(self, number: int) -> Any:
        """An evaluation comes between forward and backward."""
        loss = self.loss(number)
        seen = self.evaluate("no_grad", number + 1)
        loss.backward()
        return seen

    def backward_of_logits(self, number: int) -> Any:
        """A loss of one's own, from the logits."""
        tokens = self.ids(number)
        logits = self.model(input_ids=tokens).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1).backward()
        return logits.detach()

    def forward_only(self, number: int) -> Any:
        return self.loss(number).detach()

    def step(self) -> None:
        self.optimizer.step()

    def train(self, number: int, steps: int, clip: float | None, batches: int) -> Any:
        """An ordinary loop."""
        losses = []
        for step in range(number, number + steps):
            losses += [self.backward(step + 7 * i) for i in range(batches)]
            if clip is not None:
                norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                losses.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses)

    def scaled(self, number: int, *, overflows: bool) -> Any:
        """A step under a gradient scaler, which leaves out steps with gradients that are no numbers."""
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.optimizer.zero_grad()
        scaler.scale(self.loss(number) * (float("inf") if overflows else 1)).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return torch.tensor(scaler.get_scale())

    def zero_grad(self, of: str, *, none: bool) -> None:
        (self.model if of == "model" else self.optimizer).zero_grad(set_to_none=none)

    def evaluate(self, context: str, number: int) -> Any:
        with EVALUATIONS[context]():
            return self.model(input_ids=self.ids(number, batch=3)).logits.clone()

    def generate(self, length: int) -> Any:
        return self.model.generate(self.ids(1)[:, :2], max_new_tokens=length, do_sample=False)

    def write(self, number: int, how: str) -> None:
        every = list(self.model.parameters())
        with torch.no_grad():
            WRITES[how](every[number % len(every)])

    def freeze(self, number: int, *, frozen: bool) -> None:
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        every[number % len(every)].requires_grad_(not frozen)

    def set_option(self, key: str, value: Any) -> None:
        for group in self.optimizer.param_groups:
            group[key] = value

    def checkpointing(self, *, on: bool) -> None:
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def save(self, *, full: bool) -> None:
        if full:
            model = get_model_state_dict(self.model, options=FULL)
            optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FULL)
        else:
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        self.saved = copy.deepcopy({"full": full, "model": model, "optimizer": optimizer})

    def load(self, what: str) -> None:
        """Saved values come back, in full on rank 0 or as parts."""
        if not self.saved:
            return
        full = self.saved["full"]
        if what in ("model", "both"):
            state = copy.deepcopy(self.saved["model"])
            if full:
                set_model_state_dict(self.model, state, options=_broadcast())
            else:
                self.model.load_state_dict(state)
        if what in ("optimizer", "both"):
            state = copy.deepcopy(self.saved["optimizer"])
            if full:
                set_optimizer_state_dict(self.model, self.optimizer, state, options=_broadcast())
            else:
                self.optimizer.load_state_dict(state)

    def go_on_as_copy(self) -> None:
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    def copied(self, number: int) -> Any:
        """A copy computes the same, and leaves the model as it is."""
        twin = copy.deepcopy(self.model)
        tokens = self.ids(number)
        loss = twin(input_ids=tokens, labels=labels_of(tokens)).loss
        loss.backward()
        return loss.detach()

    def new_optimizer(self, *, loaded: bool) -> None:
        """Another optimizer for the same model, which goes on from the state of the old one or begins."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.zero_grad()
        self.saved = {}
        self.begin()
        if loaded and [len(g["params"]) for g in state["param_groups"]] == [
            len(g["params"]) for g in self.optimizer.param_groups
        ]:
            self.optimizer.load_state_dict(state)

    def expand(self, seed: int) -> None:
        """Undo the conversion and begin again, with other columns."""
        if self.setting.mode != "compact":
            return
        self.optimizer.zero_grad()
        grass.expand(self.model)
        self.convert(seed)
        self.saved = {}
        self.begin()

    def state(self) -> dict[str, Tensor]:
        """All weights, all gradients."""
        gradients = {f"gradient of {name}": value for name, value in whole_gradients(self.model).items()}
        return {**whole(self.model.state_dict()), **gradients}

    def check(self, number: int) -> None:
        """Loss, logits and gradients are those of one process with these weights."""
        plain = decoder()
        plain.load_state_dict({name: value.cpu() for name, value in whole(self.model.state_dict()).items()})
        plain.train(self.model.training)
        expected = plain_loss(plain, ids(number))
        expected.backward()
        kept = [(p, p.grad) for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        loss = self.backward(number)
        torch.testing.assert_close(loss.cpu(), expected.detach(), **CLOSE)
        theirs = {name: p.grad for name, p in plain.named_parameters()}
        ours = {name: value.cpu() for name, value in whole_gradients(self.model).items()}
        assert_close({name: self._columns(name, theirs) for name in ours}, ours, **CLOSE)
        for p, grad in kept:
            p.grad = grad

    def _columns(self, name: str, gradients: dict[str, Any]) -> Tensor:
        """Of a whole gradient, the columns that train, as they are scaled."""
        if not name.endswith(".active"):
            return gradients[name]
        layer: Any = self.model.get_submodule(name.removesuffix(".active"))
        own = torch.ones(len(layer.chosen), dtype=torch.float64)
        own[layer.rank :] = layer.gradient_scale
        grid = layer._grid
        every = grid.gather_column(layer.chosen).cpu()
        chosen = (every + torch.arange(grid.rows)[:, None] * layer.shape[1]).flatten()
        return gradients[f"{name.removesuffix('.active')}.weight"][:, chosen] * own.repeat(grid.rows)


def _broadcast() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def in_lockstep(rank: int, setting: OnGrid, actions: list[tuple[str, dict[str, Any]]]) -> bool:
    """Do the same on two grids, of which one keeps gathered weights and sends them in panels."""
    compared([GridRun(setting), GridRun(setting, **in_panels(setting))], actions, **CLOSE)
    return True


def in_panels(setting: OnGrid) -> dict[str, Any]:
    """How a grid is told to keep gathered weights, and to send them in panels."""
    return {"cache_panels": True, "panels": 2 if setting.shape[-1] == 2 else 1}


def compared(runs: list[GridRun], actions: list[tuple[str, dict[str, Any]]], **tolerance: float) -> None:
    """Do the same with two models, and compare what is seen, on the host."""
    for number, (name, arguments) in enumerate([*actions, ("check", {"number": 3})]):
        seen = []
        for run in runs:
            torch.manual_seed(number)
            seen.append({"seen": getattr(run, name)(**arguments), **run.state()})
        ours, theirs = ({k: v.cpu() for k, v in one.items() if v is not None} for one in reversed(seen))
        try:
            assert ours.keys() == theirs.keys()
            assert_close(ours, theirs, **tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name} {arguments}: {error}") from error
