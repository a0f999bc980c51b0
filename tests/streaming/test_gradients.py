"""Gradients that somebody looks at while they arrive: hooks, ``torch.autograd.grad`` and gradients of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.private_names import at_end_of_backward
from tests.offload.training import same
from tests.streaming import chains
from tests.streaming.chains import WIDTH
from tests.streaming.models import Network, build, train

IDS = torch.arange(16).view(2, 8)


def pair(**stream: Any) -> tuple[Any, Any]:
    """A resident network and a streamed one with equal values."""
    torch.manual_seed(0)
    resident = Network(checkpointed=True, dropout=0.0)
    streamed = Network(dropout=0.0)
    streamed.load_state_dict(resident.state_dict())
    grass.stream(streamed, device="cpu", **stream)
    return resident, streamed


def loss(model: nn.Module) -> Tensor:
    logits: Tensor = model(IDS)
    return logits.square().mean()


def assert_same_gradients(resident: nn.Module, streamed: nn.Module) -> None:
    grads = [[p.grad for p in model.parameters()] for model in (resident, streamed)]
    assert all(grad is not None for grad in grads[0])
    assert same(*grads)


@pytest.mark.parametrize("batches", [1, 2])
def test_tensor_hooks(batches: int) -> None:
    """They see each gradient and may change it."""
    resident, streamed = pair()
    seen: list[list[Tensor]] = [[], []]
    for model, calls in zip((resident, streamed), seen, strict=True):
        for p in (model.blocks[1].up.weight, model.blocks[3].norm.bias):
            p.register_hook(lambda grad, calls=calls: calls.append(grad.clone()) or grad * 2)
        for _ in range(batches):
            loss(model).backward()
    assert len(seen[0]) == 2 * batches
    assert same(*seen)
    assert_same_gradients(resident, streamed)


def test_hooks_after_accumulation() -> None:
    resident, streamed = pair()
    seen: list[dict[str, list[Tensor]]] = [{}, {}]
    for model, calls in zip((resident, streamed), seen, strict=True):
        for name, p in model.named_parameters():
            calls[name] = []
            p.register_post_accumulate_grad_hook(lambda p, calls=calls[name]: calls.append(p.grad.clone()))
        for _ in range(2):
            loss(model).backward()
    assert all(len(calls) == 2 for calls in seen[0].values())
    assert same(*seen)


def test_a_hook_that_was_removed() -> None:
    resident, streamed = pair()
    calls: list[Tensor] = []
    handle = streamed.blocks[0].up.weight.register_hook(calls.append)
    handle.remove()
    for model in (resident, streamed):
        loss(model).backward()
    assert not calls
    assert_same_gradients(resident, streamed)


def test_an_optimizer_that_steps_in_backward() -> None:
    def run(streamed: bool) -> Any:
        model, _ = build("full", streamed=streamed)
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=1e-2)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        losses = [train(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 1, step)[0] for step in range(4)]
        return losses, model.state_dict()

    assert same(run(True), run(False))


class Unusual(nn.Module):
    """Its gradients arrive transposed and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.t() + self.shift.sum()


def test_gradients_lie_in_memory_as_those_of_autograd() -> None:
    """So a step takes the same kernels."""
    resident, streamed, _ = chains.pair(lambda: chains.Chain([Unusual() for _ in range(3)]))
    for _ in range(2):
        for model in (resident, streamed):
            model(torch.ones(WIDTH, WIDTH)).square().mean().backward()
        assert_same_gradients(resident, streamed)
        every = zip(resident.parameters(), streamed.parameters(), strict=True)
        assert all(p.grad.stride() == q.grad.stride() for p, q in every)


def some(model: Any) -> list[Tensor]:
    return [model.embedding.weight, model.blocks[0].up.weight, model.blocks[3].norm.bias, model.head.weight]


def test_autograd_grad() -> None:
    """Returns gradients, and leaves those of the parameters alone."""
    resident, streamed = pair()
    for count in (4, 2):
        grads = [torch.autograd.grad(loss(model), some(model)[:count]) for model in (resident, streamed)]
        assert same(*grads)
    assert all(p.grad is None for p in streamed.parameters())
    assert streamed.blocks[0].up.weight.grad is None


def test_backward_for_some_parameters() -> None:
    resident, streamed = pair()
    for model in (resident, streamed):
        loss(model).backward(inputs=some(model))
    assert same(*([p.grad for p in model.parameters()] for model in (resident, streamed)))
    assert sum(p.grad is not None for p in streamed.parameters()) == 4


@pytest.mark.parametrize("offload_activations", [False, True])
def test_two_backwards_through_one_graph(offload_activations: bool) -> None:
    resident, streamed = pair(offload_activations=offload_activations)
    for model in (resident, streamed):
        graph = loss(model)
        graph.backward(retain_graph=True)
        graph.backward()
    assert_same_gradients(resident, streamed)


def test_gradients_of_gradients() -> None:
    """A penalty on the norm of the gradients, of inputs and of parameters."""
    resident, streamed = pair()
    for model in (resident, streamed):
        grads = torch.autograd.grad(loss(model), some(model), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
    assert_same_gradients(resident, streamed)


Order = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("join", [torch.add, lambda first, second: first], ids=["both", "one"])
def test_two_forwards_before_backward(join: Order) -> None:
    """As in losses of pairs; the graph that is not used is dropped."""
    resident, streamed = pair()
    for model in (resident, streamed):
        join(loss(model), model(IDS.flip(1)).mean()).backward()
    assert_same_gradients(resident, streamed)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_that_keeps_its_graph() -> None:
    """The gradients of the parameters are functions of them."""
    resident, streamed = pair()
    results = []
    for model in (resident, streamed):
        loss(model).backward(create_graph=True)
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        results.append(torch.autograd.grad(norm, some(model)))
    assert same(*results)


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")


class FailingLinear(nn.Linear):
    """Fails in backward, if told so: where its forward is computed again, or in its own backward."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward" and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("out of memory")
        y = super().forward(x)
        return Failing.apply(y) if self.fails == "backward" else y  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_gradient_comes_after_a_backward_that_failed(
    where: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that catches the error and drops the gradients goes on with those of the next batch alone.

    Autograd's thread of a device may still hold what it knows of the pass when the loop goes on (``late``).
    """
    torch.manual_seed(0)
    held: list[Callable[[], None]] = []

    def hold(last: Callable[[], None]) -> None:
        held.append(last)
        at_end_of_backward(last)

    if late:
        monkeypatch.setattr("grass.streaming.gradients.at_end_of_backward", hold)
    model = chains.Chain([FailingLinear(WIDTH, WIDTH) for _ in range(4)])
    plain = copy.deepcopy(model)
    handle = grass.stream(model, "cpu", offload=grass.Offload(_bytes_per_second=1e4))  # 29 ms for a unit's gradients
    x = torch.randn(3, WIDTH)
    model.units[1].fails = where  # type: ignore[assignment]
    try:
        model(x).sum().backward()
    except torch.OutOfMemoryError:
        model.zero_grad()
        handle._prefetcher._executor.drain()
    model.units[1].fails = ""  # type: ignore[assignment]
    assert all(p.grad is None for p in model.parameters())
    for network in (model, plain):
        network(x).sum().backward()
    assert_same_gradients(plain, model)
