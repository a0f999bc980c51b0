"""Units of many kinds: called twice, with results that are no tensors, frozen in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.offload.training import same
from tests.streaming.chains import WIDTH, Chain, pair, train


class Pair(NamedTuple):
    x: Tensor
    total: Tensor


@dataclass
class Result:
    x: Tensor
    extra: dict[str, Any]


class Returning(nn.Module):
    """Returns its values in a container, with others beside."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(WIDTH, WIDTH), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("offload_activations", [False, True])
def test_units_called_again_in_one_forward(times: int, offload_activations: bool) -> None:
    """Their gradients add up in the order of autograd."""
    resident, streamed, _ = pair(
        lambda: Chain([nn.Linear(WIDTH, WIDTH) for _ in range(4)], times=times), offload_activations=offload_activations
    )
    assert train(streamed, 4, 2) == pytest.approx(train(resident, 4, 2), rel=1e-5)
    for ours, theirs in zip(streamed.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload_activations", [False, True])
def test_checkpoints_around_units(size: int, reentrant: bool, offload_activations: bool) -> None:
    """The loop's own checkpoints, of one or of several units."""

    class Checkpointed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for start in range(0, len(self.units), size):
                part = nn.Sequential(*self.units[start : start + size])
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    def build() -> Chain:
        return Checkpointed([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4)])

    resident, streamed, _ = pair(build, offload_activations=offload_activations)
    losses = []
    for model in (resident, streamed):
        torch.manual_seed(0)
        losses.append(train(model, 4, 2))
    assert losses[0] == losses[1]
    assert same(streamed.state_dict(), resident.state_dict())


def test_one_module_at_two_places() -> None:
    def build() -> Chain:
        shared = nn.Linear(WIDTH, WIDTH)
        return Chain([shared, nn.Linear(WIDTH, WIDTH), shared])

    resident, streamed, handle = pair(build)
    assert len(handle.units) == 2
    assert train(streamed, 4) == pytest.approx(train(resident, 4), rel=1e-5)


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None, 3), lambda r: r[0]),
    "named tuple": (lambda x: Pair(x, x.sum()), lambda r: r.x + r.total),
    "dataclass": (lambda x: Result(x, {"norm": x.norm()}), lambda r: r.x / r.extra["norm"]),
    "dictionary": (lambda x: {"x": [x, x * 2]}, lambda r: r["x"][0] - r["x"][1]),
}


@pytest.mark.parametrize("pack", PACKS)
def test_results_that_are_no_tensors(pack: str) -> None:
    resident, streamed, _ = pair(lambda: Chain([Returning(PACKS[pack][0]) for _ in range(4)], PACKS[pack][1]))
    assert train(streamed, 4) == train(resident, 4)
    assert same(streamed.state_dict(), resident.state_dict())


class Noting(nn.Module):
    """Writes to a dictionary that it is given, for the units that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.linear(x) + notes.get("last", 0)
        notes["last"] = y.detach()
        return y


@pytest.mark.parametrize("offload_activations", [False, True])
def test_inputs_that_a_unit_changes(offload_activations: bool) -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(Noting() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            notes: dict[str, Tensor] = {}
            for unit in self.units:
                x = unit(x, notes)
            assert len(notes) == 1
            return x

    resident, streamed, _ = pair(Notes, offload_activations=offload_activations)
    x = torch.ones(2, WIDTH)
    assert torch.equal(streamed(x), resident(x))


@pytest.mark.parametrize("frozen", ["units.1", "units.2.weight", "units.0"])
def test_frozen_in_between(frozen: str) -> None:
    resident, streamed, _ = pair(lambda: nn.Sequential(Chain([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), nn.Tanh()))
    runs = []
    for model in (resident, streamed):
        losses = train(model, 2)
        parts = [p for name, p in model[0].named_parameters() if name.startswith(frozen)]  # type: ignore[index]
        assert parts
        for p in parts:
            p.requires_grad_(False)
        losses += train(model, 2, first=2)
        assert all(p.grad is None for p in parts)
        for p in parts:
            p.requires_grad_(True)
        runs.append([*losses, *train(model, 2, first=4)])
    assert runs[0] == runs[1]
    assert same(streamed.state_dict(), resident.state_dict())


def test_a_frozen_unit_before_all_that_train() -> None:
    """Its output wants no gradient, and backward does not come to it."""
    resident, streamed, _ = pair(lambda: Chain([nn.Linear(WIDTH, WIDTH) for _ in range(6)]))
    for model in (resident, streamed):
        model.get_submodule("units.0").requires_grad_(False)
        model.get_submodule("units.1").requires_grad_(False)
    assert train(streamed, 3) == train(resident, 3)
    assert same(streamed.state_dict(), resident.state_dict())


def test_weights_with_a_parametrization() -> None:
    resident, streamed, _ = pair(
        lambda: Chain([nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])
    )
    assert train(streamed, 4) == train(resident, 4)
    assert same(streamed.state_dict(), resident.state_dict())
