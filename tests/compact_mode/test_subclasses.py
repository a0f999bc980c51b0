"""Subclasses of ``nn.Linear``: those that compute what it does are converted, and stay what they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.compact_mode.layer import CompactLayer, CompactLinear
from grass.compact_mode.linear_classes import _REGISTERED
from tests.compact_mode.networks import train


class Named(nn.Linear):
    """Adds an attribute and a method, as torchtitan's layers do."""

    def __init__(self, width: int, role: str = "hidden") -> None:
        super().__init__(width, width)
        self.role = role

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        nn.init.zeros_(self.bias)

    def describe(self) -> str:
        return f"{self.role} {self.in_features}"


class Doubled(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Counting(nn.Linear):
    """Computes ``x W^T + b`` by a forward of its own."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight.T + self.bias


def model_of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 8))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(count)]


@pytest.fixture
def registered() -> type[nn.Linear]:
    yield grass.register_linear(Counting)
    _REGISTERED.discard(Counting)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_trains_as_a_plain_layer_does_and_stays_what_it_is(weights: str | None) -> None:
    model = model_of(Named(8))
    plain = copy.deepcopy(model)
    plain[0].__class__ = nn.Linear
    for m in (model, plain):
        assert grass.compact(m, rank=2, weights=weights) == ["0", "2"]
        train(m, GrassAdamW(m, lr=1e-2, update_interval=2), batches(5))
    layer = model[0]
    assert isinstance(layer, Named)
    assert isinstance(layer, CompactLinear)
    assert layer.describe() == "hidden 8"
    assert repr(layer).startswith("CompactNamed(in_features=8")
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    grass.expand(model)
    assert type(layer) is Named
    assert list(dict(layer.named_parameters())) == ["weight", "bias"]


def test_copies_and_pickles() -> None:
    model = model_of(Named(8))
    grass.compact(model, rank=2)
    train(model, GrassAdamW(model, lr=1e-2), batches(3))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    x = batches(1)[0][0]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(again[0]) is type(model[0])
        assert torch.equal(again(x), model(x))
        train(again, GrassAdamW(again, lr=1e-2), batches(3))
        grass.expand(again)
        assert type(again[0]) is Named


def test_a_forward_of_its_own(registered: type[nn.Linear], caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(Doubled(8, 8), registered(8, 8))
    assert grass.compact(model, rank=2) == ["1", "3"]
    assert "'0': Doubled is no plain linear layer" in caplog.text
    layer = model[1]
    x = batches(1)[0][0]
    with torch.no_grad():
        layer(x)
    assert layer.calls == 1, "its own forward, where no gradient is recorded"
    plain = copy.deepcopy(model)
    grass.expand(plain)
    torch.testing.assert_close(model(x), plain(x))


def test_what_can_be_registered() -> None:
    for cls in (nn.Conv2d, nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=r"must be a subclass of nn\.Linear"):
            grass.register_linear(cls)


class Quantised(Tensor):
    """A weight that holds another tensor, as torchao's do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *unused: object) -> Quantised:
        return Quantised(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].inner)
        raise NotImplementedError(f"no {func} of quantised weights")


def test_weights_of_other_packages_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Quantised(torch.randn(8, 8)))
    assert grass.compact(model, rank=2) == ["2"]
    assert "'0': its weight is a Quantised" in caplog.text
    assert type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match=r"got a Quantised of shape \(8, 8\).*rank=None"):
        GrassAdamW([model[0].weight], rank=2)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("at", ["store", "draw_first"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_conversion_that_fails_is_undone(
    failing: int, at: str, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out halfway."""
    model = model_of(Named(8))
    before, calls = copy.deepcopy(model), []

    def fail(layer: object, *args: object) -> Tensor | None:
        calls.append(layer)
        if len(calls) == failing:
            raise MemoryError
        return own(layer, *args)

    cls = type(converted(weights).storage) if at == "store" else CompactLayer
    own = getattr(cls, at)
    monkeypatch.setattr(cls, at, fail)
    with pytest.raises(MemoryError):
        grass.compact(model, rank=2, weights=weights)
    assert [type(m) for m in model] == [type(m) for m in before]
    assert list(dict(model.named_parameters())) == list(dict(before.named_parameters()))
    assert all(p.requires_grad for p in model.parameters())
    tolerance = 0.0 if weights is None else 0.01  # weights that were stored in 8 bits keep the rounding
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    assert grass.compact(model, rank=2, weights=weights) == ["0", "2"]


def converted(weights: str | None) -> nn.Module:
    layer = nn.Linear(4, 4)
    grass.compact(layer, rank=2, weights=weights)
    return layer


class Marked(nn.Linear):
    """Has attributes that converted layers have, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.dim, self.rank = -1, 8

    def scale(self) -> float:
        return 0.5


def test_layers_with_names_of_converted_ones_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """The conversion would overwrite attributes, and ``expand`` would take them away."""
    model = model_of(Marked(8), nn.Linear(8, 8))
    model[1].chosen = "mine"
    assert grass.compact(model, rank=2, targets="all-linear") == ["3"]
    assert "passes over '0': converted layers use its attributes ['dim', 'rank', 'scale']" in caplog.text
    assert "passes over '1': converted layers use its attributes ['chosen']" in caplog.text
    assert (model[0].dim, model[0].rank, model[0].scale(), model[1].chosen) == (-1, 8, 0.5, "mine")
    grass.expand(model)
    assert (model[0].dim, model[0].rank, model[1].chosen) == (-1, 8, "mine")


def test_flags_of_a_weight_are_those_of_its_active_rows() -> None:
    """Loops choose groups by attributes of parameters, as ``_no_weight_decay`` of state space models."""
    model = model_of(nn.Linear(8, 8))
    model[0].weight._no_weight_decay = True
    grass.compact(model, rank=2, targets="all-linear")
    assert model[0].active._no_weight_decay
    assert not hasattr(model[2].active, "_no_weight_decay")
