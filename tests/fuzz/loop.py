"""The training loop of one copy: forward, backward and steps, with evaluations and errors in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from tests.fuzz.models import BLOCKS, VOCABULARY, WIDTH
from tests.fuzz.settings import Place, Setting, streamed_in_files

CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": nullcontext,
}


def batch(number: int, length: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(number))


class Loop:
    """One copy. Each method returns what it has seen."""

    def __init__(self, setting: Setting, place: Place, directory: Path, *, in_files: bool) -> None:
        self.setting, self.place, self.directory, self.in_files = setting, place, directory, in_files
        self.model = setting.build()
        if place.stream is None:
            self.model.to(place.device).tie()
        self.saved: dict[str, Any] = {}
        self.stream: Any = None
        self.begin(streamed_first=False)

    def begin(self, *, streamed_first: bool) -> None:
        """Stream the model and make an optimizer."""
        if streamed_first:
            self.stream_again()
        self.optimizer = self.setting.optimizer(self.model, self.place.offloaded(self.directory))
        if not streamed_first:
            self.stream_again()

    def stream_again(self) -> None:
        self.close()
        if self.place.stream is not None:
            options = streamed_in_files(self.directory, self.place.stream)
            self.stream = grass.stream(self.model, self.place.device, **options)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def finish(self) -> None:
        """What the guides ask for before code reads or changes parameters or gradients by hand."""
        if (offload := getattr(self.optimizer, "offload", None)) is not None:
            offload.finish()
        if self.in_files:
            self.model.state_dict()  # weights read by hand in files are those of the last refresh

    def loss(self, number: int, depth: int = BLOCKS, length: int = 3) -> Tensor:
        ids = batch(number, length).to(self.place.device)
        return nn.functional.cross_entropy(self.model(ids, depth).float().flatten(0, 1), ids.flatten())

    def backward(self, number: int, depth: int) -> Any:
        loss = self.loss(number, depth)
        loss.backward()
        return loss.item(), self.gradients()

    def backward_later(self, number: int, depth: int) -> Any:
        """An evaluation comes between forward and backward."""
        loss = self.loss(number, depth)
        seen = self.evaluate("no_grad", number + 1)
        loss.backward()
        return loss.item(), seen, self.gradients()

    def backward_twice(self, number: int) -> Any:
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        loss.backward()
        return self.gradients()

    def backward_of_two(self, number: int) -> Any:
        self.zero_grad("optimizer", none=True)  # gradients of units add up in another order
        (self.loss(number) + self.loss(number + 1, 2)).backward()
        return self.gradients()

    def forward_only(self, number: int) -> Any:
        """Its graph is dropped."""
        return self.loss(number).item()

    def microbatches(self, number: int, count: int) -> Any:
        numbers = [number + i for i in range(count)]
        if self.stream is not None and not self.setting.dropout:
            total = self.stream.step(numbers, self.loss).item()
            return total, self.gradients()
        losses = []
        for each in numbers:
            loss = self.loss(each)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum().item(), self.gradients()

    def block_by_hand(self, number: int, *, backward: bool) -> Any:
        x = torch.linspace(-1, 1, WIDTH).repeat(3, 1).to(self.model.shift.dtype)
        with nullcontext() if backward else torch.no_grad():
            y = self.model.blocks[number](x, self.model.shift)
        if backward and y.requires_grad:
            y.float().square().sum().backward()
        return y.detach().clone()

    def fail(self, moment: str, number: int, *, then: str) -> Any:
        """A forward or backward that raises; training goes on."""
        block, was = self.model.blocks[number], self.model.checkpointed
        block.fails, self.model.checkpointed = moment, True
        with pytest.raises(ArithmeticError, match="on purpose"):
            self.loss(number).backward()
        block.fails, self.model.checkpointed = "", was
        if moment != "forward":  # which gradients have arrived before is not said
            then = "optimizer"
        if then:
            self.zero_grad(then, none=True)
        return self.gradients()

    def step(self, *, closure: bool) -> Any:
        if not closure:
            return self.optimizer.step()

        def evaluated() -> float:
            self.optimizer.zero_grad()
            loss = self.loss(99)
            loss.backward()
            return loss.item()

        return self.optimizer.step(evaluated)

    def train(self, number: int, steps: int, clip: float | None, batches: int, depth: int) -> Any:
        """An ordinary loop."""
        losses = []
        for step in range(number, number + steps):
            for i in range(batches):
                loss = self.loss(step + 7 * i, depth)
                loss.backward()
                losses.append(loss.item())
            if clip is not None:
                losses.append(nn.utils.clip_grad_norm_(self.model.parameters(), clip).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def scaled(self, number: int, *, overflows: bool) -> Any:
        """A step under a gradient scaler, which leaves out steps with gradients that are no numbers."""
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.optimizer.zero_grad()
        loss = self.loss(number) * (float("inf") if overflows else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return scaler.get_scale()

    def zero_grad(self, of: str, *, none: bool) -> None:
        if of == "model" and not none:
            self.finish()
        (self.model if of == "model" else self.optimizer).zero_grad(set_to_none=none)

    def clip(self, norm: float) -> Any:
        self.finish()
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm).item()

    def gradients(self) -> Any:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}

    def evaluate(self, context: str, number: int, *, train: bool = False) -> Any:
        was = self.model.training
        self.model.train(train)
        with CONTEXTS[context]():
            loss = self.loss(number, length=5).item()
        self.model.train(was)
        return loss
