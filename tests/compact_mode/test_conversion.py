"""``compact`` and ``expand``: what is converted, what is passed over, what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.compact_mode.layer import LAYERS, CompactLayer, CompactLinear
from tests.compact_mode.networks import DIMS, Network, assert_same_weights, batches, compact_layers, converted, train

NAMES = ["up", "mix", "down"]


def snapshot(model: nn.Module) -> list[tuple]:
    """Everything a refused conversion must not touch."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    parameters = [(name, p.requires_grad, id(p), p.stride()) for name, p in model.named_parameters()]
    return [*modules, *parameters, *(name for name, _ in model.named_buffers())]


@pytest.mark.parametrize("dim", DIMS)
def test_round_trip(dim: int) -> None:
    model, plain = Network(), Network()
    parameters = dict(model.named_parameters())
    assert grass.compact(model, rank=3, explore=0, dim=dim) == NAMES
    for name, layer in compact_layers(model).items():
        assert isinstance(layer, CompactLinear)
        assert layer.weight is parameters[f"{name}.weight"], "the parameter stays the one that others may hold"
        assert not layer.weight.requires_grad
        assert layer.selected.tolist() == sorted(set(layer.selected.tolist()))
        assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    biases = {"up.bias", "mix.bias", "norm.weight", "norm.bias"}
    assert trainable == biases | {f"{name}.active" for name in NAMES}

    assert grass.expand(model) == NAMES
    assert snapshot(model)[: len(list(model.modules()))] == snapshot(plain)[: len(list(plain.modules()))]
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p is parameters[name]
        assert torch.equal(p, expected)
        assert p.is_contiguous()
        assert p.requires_grad
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert not list(ours.named_buffers())
    assert grass.expand(model) == []


def test_expand_keeps_what_was_trained() -> None:
    model, optimizer = converted(active=torch.float32, dtype=torch.bfloat16)
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    with torch.no_grad():
        model.up.active[0] = 7.0  # not written back yet
    row = model.up.selected[0]
    grass.expand(model)
    assert (model.up.weight[:, row] == 7.0)[0]
    assert not any(layer in LAYERS for layer in model.modules())


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_layout(dim: int, weights: str | None) -> None:
    """That of plain layers: row-major, also of active rows, their gradients and what a ``state_dict`` holds."""
    model = Network()
    grass.compact(model, rank=3, explore=4, dim=dim, weights=weights)
    train(model, grass.GrassAdamW(model, update_interval=2), batches(3))
    for network in (model, copy.deepcopy(model)):
        every = [*network.parameters(), *network.state_dict().values()]
        assert all(t.is_contiguous() for t in every)
        assert network.up.weight.view(-1).shape == (240,)
    assert all(p.grad.is_contiguous() for p in model.parameters() if p.grad is not None)
    grass.expand(model)
    assert all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("explore", [0, 4])
def test_training_leaves_nothing_that_hinders_the_next_conversion(weights: str | None, explore: int) -> None:
    model, plain = Network(), Network()
    for selection in ("uniform", "top_r"):
        grass.compact(model, rank=3, explore=explore, weights=weights)
        train(model, grass.GrassAdamW(model, update_interval=2, selection=selection), batches(3))
        grass.expand(model)
        for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
            assert vars(ours).keys() == vars(theirs).keys()
    assert grass.compact(model, rank=4, explore=explore) == NAMES


def test_converting_again() -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0, targets=["up"])
    before = model.up.selected.clone(), model.up.active
    assert grass.compact(model, rank=3, explore=0) == NAMES
    assert torch.equal(model.up.selected, before[0])
    assert model.up.active is before[1]
    state = snapshot(model)
    for options in ({"rank": 4}, {"rank": 3, "dim": 0}):
        with pytest.raises(ValueError, match=r"'up' was converted with rank=3, dim=1.*expand"):
            grass.compact(model, **options)
    assert snapshot(model) == state
    grass.expand(model)
    assert grass.compact(model, rank=4, explore=0, dim=0) == NAMES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 13}, r"rank=13.*up to 12 \('up'"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"rank": 0.0}, "rank=0.0"),
        ({"rank": 3, "dim": 2}, "dim=2"),
        ({"rank": 3, "dim": "auto"}, "dim='auto'"),
        ({"rank": 9, "dim": 0}, r"rank=9.*up to 8 \('down'"),
        ({"rank": 3, "dtype": torch.int8}, "dtype=torch.int8"),
        ({"rank": 3, "targets": ["nowhere"]}, "nowhere.*up, mix, down"),
        ({"rank": 3, "exclude": NAMES}, "match no linear layer"),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(options: dict, message: str) -> None:
    model = Network()
    state = snapshot(model)
    with pytest.raises(ValueError, match=message):
        grass.compact(model, **options)
    assert snapshot(model) == state


def test_fractions_are_of_the_selected_dimension() -> None:
    model = Network()
    grass.compact(model, rank=0.25, explore=0, dim=1)
    assert [layer.active.shape for layer in compact_layers(model).values()] == [(20, 3), (16, 5), (8, 4)]


def test_targets() -> None:
    model = Network()
    assert grass.compact(model, rank=2, explore=0, targets=["up", "mix"], exclude="mi.") == ["up"]
    assert [name for name, module in model.named_modules() if isinstance(module, CompactLayer)] == ["up"]


class Quantised(nn.Linear):
    """A stand-in for the linear layers of bitsandbytes and others: a subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.round(), self.bias)


class Wrapped(nn.Module):
    """As PEFT does it: a frozen base layer with trainable factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 6).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Quantised(6, 6), "Quantised is no plain linear layer"),
        (lambda: nn.Linear(6, 6).requires_grad_(False), "frozen"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), "no parameter"),
        (lambda: nn.utils.weight_norm(nn.Linear(6, 6)), "no parameter"),
    ],
    ids=["subclass", "frozen", "parametrised", "weight norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_passed_over_with_a_message(make: Callable[[], nn.Module], reason: str, caplog) -> None:
    odd = make()
    model = nn.Sequential(odd, nn.Linear(6, 6))
    cls, names = type(odd), [name for name, _ in odd.named_parameters()]
    assert grass.compact(model, rank=2, explore=0) == ["1"]
    assert "0" in caplog.text
    assert reason in caplog.text
    assert type(odd) is cls
    assert [name for name, _ in odd.named_parameters()] == names
    alone = nn.Sequential(odd)
    with pytest.raises(ValueError, match=r"can be converted: '0'|computed"):
        grass.compact(alone, rank=2, explore=0)


def test_shared_weights_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 6), "proj": nn.Linear(6, 9), "other": nn.Linear(6, 6)})
    model["proj"].weight = model["embed"].weight
    assert grass.compact(model, rank=2, explore=0) == ["other"]
    assert model["proj"].weight is model["embed"].weight
    assert "proj" in caplog.text
    assert "shared" in caplog.text
    with pytest.raises(ValueError, match="shared"):
        grass.compact(nn.ModuleDict({"embed": model["embed"], "proj": model["proj"]}), rank=2, explore=0)


def test_wrapped_by_peft_names_are_found_by_pattern() -> None:
    model = nn.Sequential(Wrapped(), nn.Linear(6, 6))
    assert grass.compact(model, rank=1, explore=0, exclude=r".*lora_.*") == ["1"]
    assert type(model[0].base_layer) is nn.Linear


def test_a_bare_layer_and_one_module_under_two_names() -> None:
    assert grass.compact(nn.Linear(4, 4), rank=2, explore=0) == [""]
    layer = nn.Linear(6, 6)
    assert grass.compact(nn.Sequential(layer, nn.ReLU(), layer), rank=2) == ["0"]


@pytest.mark.parametrize("dim", DIMS)
def test_conv1d(dim: int) -> None:
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    model = nn.Sequential(conv1d(10, 6), conv1d(6, 10))
    plain = copy.deepcopy(model)
    assert (
        grass.compact(model, rank=2, explore=0, dim=dim)
        == grass.compact(model, rank=2, explore=0, dim=dim)
        == ["0", "1"]
    )
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), plain(x))
    assert f"rank=2, dim={dim}" in repr(model)
    assert grass.expand(model) == ["0", "1"]
    for ours, theirs in zip(model, plain, strict=True):
        assert type(ours) is conv1d
        assert vars(ours).keys() == vars(theirs).keys()
        assert torch.equal(ours.weight, theirs.weight)
        assert ours.weight.is_contiguous()
        assert ours.weight.requires_grad


def test_repr() -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0)
    assert "(up): CompactLinear(in_features=12, out_features=20, bias=True, rank=3, dim=1)" in repr(model)


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("active", [None, torch.float32], ids=["same dtype", "fp32 rows"])
def test_copies(through, active: torch.dtype | None) -> None:
    """A copy has its own weights, trains under its own optimizer and leaves the original alone."""
    model, optimizer = converted(torch.bfloat16, active=active)
    train(model, optimizer, batches(5, dtype=torch.bfloat16))
    other = through(model)
    assert_same_weights(other, model)
    kept = copy.deepcopy(model)
    losses = train(other, grass.GrassAdamW(other, lr=1e-2), batches(3, dtype=torch.bfloat16))
    assert_same_weights(model, kept)
    assert losses
    assert not torch.equal(other.up.weight, model.up.weight)


def test_dropped_models_are_not_kept_alive() -> None:
    import gc

    model, optimizer = converted()
    train(model, optimizer, batches(5))
    layers = set(compact_layers(model).values())
    assert layers <= set(LAYERS)
    identities = {id(layer.weight) for layer in layers}
    del model, optimizer, layers
    gc.collect()
    assert not identities & {id(layer.weight) for layer in LAYERS}


class Decoder(nn.Module):
    """Has the encoder's layer and multiplies by its weight."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(this, z: Tensor) -> Tensor:
        return z @ this.encoder.weight


@pytest.mark.parametrize("first", ["enc", "dec"])
def test_a_layer_that_another_module_reads_under_its_own_name(first: str, caplog) -> None:
    layer = nn.Linear(6, 8)
    parts = {"enc": layer, "dec": Decoder(layer)}
    model = nn.ModuleDict({name: parts[name] for name in (first, *parts)} | {"other": nn.Linear(6, 6)})
    assert grass.compact(model, rank=2) == ["other"]
    assert "Decoder reads its weight" in caplog.text


def test_each_name_of_a_module_counts() -> None:
    def model() -> nn.Module:
        layer, head = nn.Linear(6, 6), nn.Linear(6, 6)
        return nn.ModuleDict({"a": layer, "rest": nn.ModuleDict({"b": layer, "x": head}), "lm_head": head})

    assert grass.matched_modules(model()) == ["a"]
    assert grass.matched_modules(model(), targets=["b"]) == ["a"]
    assert grass.matched_modules(model(), targets=["x"]) == ["rest.x"]
    assert grass.compact(model(), rank=2, targets=["a", "x"], exclude=["b"]) == ["rest.x"]
    with pytest.raises(ValueError, match="match no linear layer"):
        grass.compact(model(), rank=2, exclude=["rest.b"])


@pytest.mark.parametrize("weights", [None, "int8"])
def test_codes_and_the_fast_path_of_encoders(weights: str | None, caplog) -> None:
    """In evaluations ``nn.TransformerEncoderLayer`` reads weights past its layers; a warning says how to stop it."""
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    grass.compact(model, rank=2, weights=weights)
    assert ("set_fastpath_enabled(False)" in caplog.text) == (weights is not None)
    x = torch.randn(2, 3, 16)
    expected = model.eval()(x)  # with gradients it calls its layers
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(weights is None)
    try:
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)  # another order of sums
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
