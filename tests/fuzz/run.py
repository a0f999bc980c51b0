"""What a user may do with a model and its optimizer between two steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import grass
from tests.fuzz.loop import Loop, batch
from tests.fuzz.models import BLOCKS
from tests.fuzz.settings import ATTACHED, Place

WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda p: p.mul_(0.75),
    "add_": lambda p: p.add_(0.125),
    "copy_": lambda p: p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape)),
}


class Run(Loop):
    """One copy, and what may be done with it. Each method returns what it has seen."""

    def parameters(self) -> Any:
        self.finish()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self, what: str) -> Any:
        return copy.deepcopy({name: self.of(name).state_dict() for name in _named(what)})

    def of(self, name: str) -> Any:
        return self.model if name == "model" else self.optimizer

    def mode(self, *, training: bool) -> None:
        self.model.train(training)

    @torch.no_grad()
    def generate(self, length: int) -> Any:
        self.model.eval()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.place.device)
        for _ in range(length):
            ids = torch.cat([ids, self.model(ids)[:, -1:].argmax(-1)], dim=1)
        self.model.train()
        return ids

    def save(self, *, file: bool) -> Any:
        self.saved = self.state("both")
        if file:
            opened = io.BytesIO()
            torch.save({name: self.of(name).state_dict() for name in _named("both")}, opened)
            self.saved = torch.load(io.BytesIO(opened.getvalue()), weights_only=True)
        return self.saved

    def load(self, what: str, other: Run, *, crosswise: bool) -> None:
        saved = (other if crosswise else self).saved
        for name in _named(what):
            if saved:
                self.of(name).load_state_dict(saved[name])

    def load_own(self, what: str) -> None:
        for name in _named(what):
            self.of(name).load_state_dict(self.of(name).state_dict())

    def put_in(self, scale: float) -> None:
        """Load other values, as to evaluate with them, and the own ones again."""
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict({k: v * scale if v.is_floating_point() else v for k, v in own.items()})
        self.model.load_state_dict(own)

    def write(self, number: int, how: str) -> None:
        self.finish()
        every = [p for p in self.model.parameters() if p.is_floating_point()]
        with torch.no_grad():
            WRITES[how](every[number % len(every)])

    def set_option(self, key: str, value: Any) -> None:
        for group in self.optimizer.param_groups:
            group[key] = value

    def freeze(self, number: int, *, frozen: bool) -> None:
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        every[number % len(every)].requires_grad_(not frozen)

    def cast(self) -> None:
        self.finish()
        self.model.to(self.model.shift.dtype)

    def add_group(self, number: int) -> None:
        """A parameter that has not trained so far."""
        p = self.model.gain if number == BLOCKS else self.model.blocks[number].late
        if not p.requires_grad and not any(p is q for group in self.optimizer.param_groups for q in group["params"]):
            p.requires_grad_(True)
            given: Any = [("late", p)] if self.setting.mode == "dense" else [p]  # names in all groups or in none
            options = {} if self.setting.mode == "muon" else {"rank": None}
            self.optimizer.add_param_group({"params": given, "lr": 1e-2, **options})
            self.saved = {}

    def checkpointing(self, *, on: bool) -> None:
        self.model.checkpointed = on

    def copied(self, number: int) -> Any:
        """A copy of the model computes the same, and leaves the model as it is."""
        twin = copy.deepcopy(self.model)
        ids = batch(number).to(self.place.device)
        loss = nn.functional.cross_entropy(twin(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        return loss.item(), dict(twin.state_dict())

    def go_on_as_copy(self) -> None:
        if self.setting.mode in ATTACHED:  # hooks of an optimizer are not copied
            self.model = copy.deepcopy(self.model)
            self.new_optimizer(loaded=True)
        else:
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self.stream = None
        self.stream_again()

    def new_optimizer(self, *, loaded: bool, seed: int = 0) -> None:
        """Another optimizer for the same model, which goes on from the state of the old one or begins."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.zero_grad()
        sizes = _sizes(self.optimizer)
        self.optimizer = self.setting.optimizer(self.model, self.place.offloaded(self.directory), seed)
        self.saved = {}
        if loaded and sizes == _sizes(self.optimizer):
            self.optimizer.load_state_dict(state)

    def expand(self, *, streamed_first: bool) -> None:
        """Undo the conversion and begin again."""
        if self.setting.mode not in ("compact", *ATTACHED):
            return
        self.optimizer.zero_grad()
        self.close()
        grass.expand(self.model)
        self.setting.convert(self.model)
        self.saved = {}
        self.begin(streamed_first=streamed_first)

    def move(self, place: Place | None) -> None:
        """Stream again, or stop streaming. ``None``: the copy that stays where it is."""
        if place is not None:
            self.place = Place(place.stream, self.place.offload, self.place.device)
            self.stream_again()


def _named(what: str) -> list[str]:
    return ["model", "optimizer"] if what == "both" else [what]


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
