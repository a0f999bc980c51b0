"""What optimizers over active rows remember of them: other rows take it over, or it is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import grass
from tests.compact_mode.networks import (
    DIMS,
    PLAYED,
    Network,
)
from tests.compact_mode.test_attach import Make
from tests.reference import uneven_gradients


def adafactor_of_transformers(p: list[Tensor]) -> torch.optim.Optimizer:
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False, clip_threshold=1e9)


@pytest.mark.parametrize("explore", [0, 4, 12])
@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Adafactor(p, lr=1e-3), adafactor_of_transformers], ids=["torch", "transformers"]
)
def test_adafactor_s_new_rows_move_as_far_as_others(make: Make, dim: int, policy: str, explore: int) -> None:
    """Gradients of rows differ by 10^3, which its second moments take out: also of rows that were selected just now.

    With twelve explored rows the matrix of active rows is square. Factors of transformers' class are vectors.
    """
    scales = torch.tensor([10.0 ** (i % 4 - 2) for i in range(16)])
    layer = nn.Linear(16, 16, bias=False)
    grass.compact(layer, rank=4, explore=explore, dim=dim)
    optimizer = make([layer.active])
    grass.attach(optimizer, layer, update_interval=5, state_policy=policy)
    generator, moved = torch.Generator().manual_seed(0), []
    for _ in range(6):
        before, rows = layer.weight.detach().clone(), layer.selected.clone()
        optimizer.zero_grad()
        factors = scales if dim == 1 else scales.unsqueeze(1)
        gradient = factors * torch.randn(16, 16, generator=generator)
        layer(torch.eye(16)).backward(gradient.t())
        optimizer.step()
        moved.append((layer.weight.detach() - before).abs().mean(1 - dim)[rows])
    assert 0.2 < moved[-1].min() / moved[-1].max() < 1


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_momentum_across_refreshes(policy: str, dim: int) -> None:
    """SGD's momentum of rows chosen again is kept or zeroed; checked against a full-size buffer, in float64."""
    layer = nn.Linear(7, 6, bias=False, dtype=torch.float64)
    weight, buffer = layer.weight.detach().clone(), torch.zeros(6, 7, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=0, dim=dim)
    optimizer = torch.optim.SGD([layer.active], lr=0.1, momentum=0.9)
    grass.attach(optimizer, layer, update_interval=2, state_policy=policy, selection="playback")
    rows = [layer.selected.clone(), *(torch.tensor(r) for r in ([0, 1, 2], [1, 2, 5], [0, 3, 5], [0, 3, 5], [2, 3, 4]))]
    PLAYED.append(iter(rows[1:]))
    for step, gradient in enumerate(uneven_gradients((6, 7), 10)):
        chosen = rows[step // 2]
        if step % 2 == 0:
            kept = torch.isin(chosen, rows[step // 2 - 1]) if policy == "keep" and step else torch.zeros(3, dtype=bool)
            stays = torch.zeros(buffer.shape[dim], dtype=bool).index_fill(0, chosen[kept], True)
            buffer *= stays.unsqueeze(1 - dim)
        moved = torch.zeros(buffer.shape[dim], dtype=torch.float64).index_fill(0, chosen, 1.0).unsqueeze(1 - dim)
        buffer = 0.9 * buffer + gradient * moved
        weight = weight - 0.1 * buffer * moved
        optimizer.zero_grad()
        layer(torch.eye(7, dtype=torch.float64)).backward(gradient.t())
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), weight)
    PLAYED.pop()


@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("explore", [0, 2])
def test_adagrad_s_new_rows_begin_with_its_first_value(explore: int, policy: str, caplog) -> None:
    """Otherwise they would move by the whole learning rate, where others move a hundredth of it."""
    layer = nn.Linear(12, 8, bias=False, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=explore)
    optimizer = torch.optim.Adagrad([layer.active], lr=0.1, initial_accumulator_value=4.0)
    grass.attach(optimizer, layer, update_interval=1, state_policy=policy)
    for _ in range(4):
        before, selected = layer.weight.clone(), layer.selected.clone()
        layer.active.grad = torch.full_like(layer.active, 0.02)
        optimizer.step()
        moved = (before - layer.weight)[:, selected]
        torch.testing.assert_close(moved, torch.full_like(moved, 0.1 * 0.02 / 2), rtol=1e-3, atol=0)
    assert not caplog.records


class PagedAdamW8bit(torch.optim.SGD):
    """An optimizer that another library calls an AdamW; without gradients it takes no decay off active rows."""


@pytest.mark.parametrize(
    ("make", "strength"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2, decoupled_weight_decay=True), 0.02),
        (lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2), 0.0),
        (lambda p: PagedAdamW8bit(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.SGD([{"params": p, "weight_decouple": True}], lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: PagedAdamW8bit([{"params": p, "weight_decouple": False}], lr=0.1, weight_decay=0.2), 0.0),
    ],
    ids=["AdamW", "Adam", "Muon", "Adafactor", "SGD", "AdamW of another library", "by its group", "not by its group"],
)
def test_decoupled_decay_of_explored_rows(make: Make, strength: float) -> None:
    """As strong as for selected rows on average: a row is explored in ``q`` of ``n - r`` steps."""
    layer = nn.Linear(12, 8, bias=False, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=4)
    optimizer = make([layer.active])
    grass.attach(optimizer, layer)
    before, explored = layer.weight.clone(), layer.explored.clone()
    layer.active.grad = torch.zeros_like(layer.active)
    optimizer.step()
    expected = before[:, explored] * (1 - strength * 9 / 4)
    torch.testing.assert_close(layer.weight[:, explored], expected)


class Codes(torch.optim.SGD):
    """An optimizer whose state of a parameter is one byte for each element, as of 8-bit AdamW."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("state1", torch.zeros_like(p, dtype=torch.uint8))
        return super().step(closure)


def test_codes_of_moments_are_refused_in_the_first_step() -> None:
    """Blocks of rows share a scale: exchanged and zeroed codes would stand for other moments."""
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3)
    optimizer = Codes([layer.active], lr=0.1)
    grass.attach(optimizer, layer)
    layer.active.grad = torch.ones_like(layer.active)
    with pytest.raises(ValueError, match=r"Codes holds 'state1' of active rows as Tensor of torch.uint8"):
        optimizer.step()


@pytest.mark.slow
def test_states_of_tensor_subclasses_are_refused_in_the_first_step() -> None:
    torchao = pytest.importorskip("torchao.optim")
    layer = nn.Linear(256, 256, bias=False)
    grass.compact(layer, rank=0.25)
    optimizer = torchao.AdamW8bit([layer.active])
    grass.attach(optimizer, layer)
    layer.active.grad = torch.ones_like(layer.active)
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="as OptimState8bit of"):
        optimizer.step()


class Remembering(torch.optim.SGD):
    """An optimizer that remembers something of each parameter from before its first step."""

    def __init__(self, params: list[Tensor], remember: Callable[[Tensor], object]) -> None:
        self.remember = remember
        super().__init__(params, lr=1e-3, momentum=0.9)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("memory", self.remember(p.detach()))
        return super().step(closure)


@pytest.mark.parametrize(
    ("remember", "message"),
    [
        (lambda p: p.clone(), "a copy of active rows"),  # the x0 of MADGRAD, the z of Schedule-Free
        (lambda p: p.flatten()[::11].clone(), "a copy of active rows"),  # Prodigy's slices
        (lambda p: p.flatten().clone(), "a copy of active rows"),  # of one element each, its default
        (lambda p: torch.zeros(2, *p.shape), "with more than an entry for each active row"),  # AdEMAMix's
        (lambda p: {0.9: torch.zeros_like(p)}, "with more than an entry for each active row"),  # AggMo's
        (lambda p: deque([torch.zeros_like(p)]), "with more than an entry for each active row"),  # AdaShift's
        (lambda p: SimpleNamespace(matrix=torch.zeros(32, 4)), "with more than an entry"),  # GaLore's projector
        (lambda p: p.T @ p, "a matrix over active rows"),  # Shampoo's
        (lambda p: [p @ p.T, p.T @ p], "a matrix over active rows"),  # SOAP's
        (lambda p: torch.zeros_like(p), None),
        (lambda p: [p @ p.T], None),  # of the other dimension
        (lambda p: p.mean(), None),
    ],
)
def test_state_that_other_rows_cannot_take_over(remember: Callable[[Tensor], object], message: str | None) -> None:
    layer = nn.Linear(64, 24, bias=False)
    grass.compact(layer, rank=16)
    optimizer = Remembering([layer.active], remember)
    grass.attach(optimizer, layer)
    layer.active.grad = torch.randn_like(layer.active)
    if message is None:
        optimizer.step()
        return
    with pytest.raises(ValueError, match=f"Remembering holds 'memory', {message}"):
        optimizer.step()


class OwnAdafactor(torch.optim.Adafactor):
    """A loop's own class of Adafactor."""


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, OwnAdafactor])
@pytest.mark.parametrize("keyword", [False, True])
def test_adafactor_steps_by_a_closure_as_without(kind: type[torch.optim.Adafactor], keyword: bool) -> None:
    """Lightning steps so: the gradient of new columns exists within the step only."""
    inputs = 10.0 ** torch.arange(-5, 7)

    def trained(closes: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(12, 8, bias=False)
        grass.compact(layer, rank=3, explore=0)
        optimizer = kind([layer.active], lr=0.1)
        grass.attach(optimizer, layer, update_interval=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = layer(inputs).square().sum()
            loss.backward()
            return loss

        for _ in range(6):
            if closes:
                assert (optimizer.step(closure=closure) if keyword else optimizer.step(closure)) is not None
            else:
                closure()
                optimizer.step()
        return layer.weight

    assert torch.equal(trained(True), trained(False))


def test_lbfgs_takes_no_explored_rows() -> None:
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3, dim=0)
    with pytest.raises(ValueError, match="convert with dim=0, and with explore=0"):
        grass.attach(torch.optim.LBFGS([layer.active]), layer)


def test_momentum_is_no_copy_where_the_gradient_is_the_weight() -> None:
    """As with a loss of half the squared norm."""
    layer = nn.Linear(64, 24, bias=False)
    grass.compact(layer, rank=16)
    optimizer = torch.optim.SGD([layer.active], lr=0.1, momentum=0.9)
    grass.attach(optimizer, layer)
    layer.active.grad = layer.active.detach().clone()
    optimizer.step()
    assert optimizer.state[layer.active]["momentum_buffer"].any()


@pytest.mark.parametrize(
    ("make", "explore", "warns"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), None, True),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), 0, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), None, False),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), None, False),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), None, False),
    ],
)
def test_decay_in_the_gradient_does_not_reach_explored_rows(
    make: Make, explore: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Network()
    grass.compact(model, rank=3, explore=explore)
    grass.attach(make([p for p in model.parameters() if p.requires_grad]), model)
    assert ("does not reach explored columns" in caplog.text) == warns
