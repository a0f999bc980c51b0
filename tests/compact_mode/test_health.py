"""What trains nothing says so: layers never called, refreshes without norms, rows with two owners, frozen rows."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import Network, assert_same_weights, batches, compact_layers, loss_of, train


class ReadsItsWeight(nn.Module):
    """As Mamba does with ``dt_proj``; also reads what is no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(12, 12), nn.Linear(12, 8)
        nn.init.zeros_(self.called.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x.to(self.called.weight.dtype))
        return x @ self.read.weight.t()


def messages(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_layer_whose_weight_is_read_directly_is_not_converted(caplog) -> None:
    model = nn.Sequential(ReadsItsWeight())
    with caplog.at_level(logging.WARNING, "grass"):
        assert grass.compact(model, rank=3) == ["0.called"]
    assert "passes over '0.read': ReadsItsWeight reads its weight without calling it" in messages(caplog)
    before = model[0].read.weight.detach().clone()
    train(model, GrassAdamW(model, lr=1e-2), batches(2))
    assert not torch.equal(model[0].read.weight, before)


def test_mamba_trains_every_weight() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=4)
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config)
    names = grass.compact(model, rank=0.5)
    assert any("in_proj" in name for name in names)
    assert not any("dt_proj" in name for name in names)
    optimizer = GrassAdamW(model, lr=1e-2)
    ids = torch.randint(11, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    optimizer.step()


class Skips(Network):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))[:, :8]


@pytest.mark.parametrize("mode", ["compact", "dense"])
def test_layers_without_a_gradient_are_named_once(mode: str, caplog) -> None:
    model = Skips()
    if mode == "compact":
        grass.compact(model, rank=3)
        params = model
    else:
        params = grass.param_groups(model, rank=3)
    optimizer = GrassAdamW(params, update_interval=3)
    with caplog.at_level(logging.WARNING, "grass"):
        train(model, optimizer, batches(2))
        assert not caplog.records
        train(model, optimizer, batches(10))
    text = messages(caplog)
    assert len(caplog.records) == 1
    assert "2 weights got no gradient and do not train: " in text
    assert "mix" in text
    assert "down" in text
    assert "(in 3 steps)" in text
    assert "up" not in text.split(":")[-1].replace("update", "")


@pytest.mark.parametrize("mode", ["compact", "dense"])
def test_parameters_that_are_unfrozen_later_are_named_once(mode: str, caplog) -> None:
    model = Network()
    model.norm.requires_grad_(False)
    if mode == "compact":
        grass.compact(model, rank=3)
        optimizer = GrassAdamW(model)
    else:
        model.mix.requires_grad_(False)
        optimizer = GrassAdamW(grass.param_groups(model, rank=3))
    train(model, optimizer, batches(1))
    caplog.clear()
    model.norm.requires_grad_(True)
    optimizer.add_param_group({"params": [model.norm.bias], "rank": None})
    train(model, optimizer, batches(4))
    assert len(caplog.records) == 1
    assert messages(caplog).endswith("or build the optimizer before you freeze: 'norm.weight'")


@pytest.mark.parametrize("kind", [GrassAdamW, grass.GrassMuon])
def test_parameters_that_are_replaced_after_the_optimizer_was_built_are_named_once(kind: type, caplog) -> None:
    """Those of the layers that are not converted, by ``assign=True``; the active rows stay."""
    model = Network()
    grass.compact(model, rank=3)
    optimizer = kind(model)
    train(model, optimizer, batches(1))
    caplog.clear()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    kept = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in kept]
    assert "norm.weight" in lost
    train(model, optimizer, batches(2 * len(lost)))
    assert len(caplog.records) == 1
    text = messages(caplog)
    assert text.startswith(f"Grass: {len(lost)} weights were replaced after this optimizer was built")
    assert all(repr(name) in text for name in lost)


def test_parameters_that_the_loop_takes_out_or_that_others_share_are_not_replaced(caplog) -> None:
    model = Network()
    grass.compact(model, rank=3)
    plain = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("active")]
    optimizer = GrassAdamW(model)
    before = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [p for p in before if all(p is not own for own in plain[:1])]
    model.load_state_dict(model.state_dict())
    train(model, optimizer, batches(3 * len(plain)))
    assert not caplog.records


@pytest.mark.parametrize(("rule", "warns"), [("multinomial_norm", True), ("uniform", False)])
def test_gradients_by_hand_bring_no_norms(rule: str, warns: bool, caplog) -> None:
    model = Network()
    grass.compact(model, rank=3)
    optimizer = GrassAdamW(model, update_interval=2, selection=rule)
    trained = [p for p in model.parameters() if p.requires_grad]
    with caplog.at_level(logging.WARNING, "grass"):
        for batch in batches(8):
            for p, grad in zip(trained, torch.autograd.grad(loss_of(model, batch), trained), strict=True):
                p.grad = grad
            optimizer.step()
    assert ("overdue refresh" in messages(caplog)) == warns
    assert len(caplog.records) == warns


def test_two_optimizers_on_the_same_rows() -> None:
    model = Network()
    grass.compact(model, rank=3)
    first, second = GrassAdamW(model), GrassAdamW(model)
    loss_of(model, batches(1)[0]).backward()
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="active rows of 'up' belong to a GrassAdamW that was built later"):
        first.step()
    assert_same_weights(model, before)
    train(model, second, batches(1))
    del second
    gc.collect()
    train(model, first, batches(1))


def test_a_copied_model_has_an_optimizer_of_its_own() -> None:
    model = Network()
    grass.compact(model, rank=3)
    optimizer = GrassAdamW(model)
    train(model, optimizer, batches(1))
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), (model_copy, optimizer_copy)):
        train(*pair, batches(2))
    assert_same_weights(model, model_copy)


def test_frozen_active_rows_are_refused() -> None:
    model = Network()
    grass.compact(model, rank=3)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="active rows of all 3 converted layers are frozen"):
        GrassAdamW(model)


def test_a_layer_that_is_unfrozen_by_its_weight_trains() -> None:
    """As loops that know no active rows unfreeze it: all is frozen first, then some by their names."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    grass.compact(model, rank=2)
    model.requires_grad_(False)
    dict(model.named_parameters())["1.weight"].requires_grad_(True)
    names = [name for group in GrassAdamW(model).param_groups for name in group["param_names"]]
    assert names == ["1.active"]
    assert not model[1].weight.requires_grad


def test_a_layer_that_is_unfrozen_by_its_weight_while_others_train(caplog) -> None:
    """A warning names it, and what it says to do works."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    grass.compact(model, rank=2)
    model[0].requires_grad_(False)
    optimizer, before = GrassAdamW(model), model[0].weight.detach().clone()
    train_on_ones(model, optimizer)
    model[0].weight.requires_grad_(True)
    train_on_ones(model, optimizer)
    assert "have been unfrozen and do not train" in messages(caplog)
    assert messages(caplog).endswith("'0.weight'")
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train_on_ones(model, optimizer)
    assert not torch.equal(model[0].weight, before)


def train_on_ones(model: nn.Module, optimizer: GrassAdamW) -> None:
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_some_frozen_active_rows_are_named(caplog) -> None:
    model = Network()
    grass.compact(model, rank=3)
    model.up.active.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "grass"):
        optimizer = GrassAdamW(model)
    assert "not trained: 'up'" in messages(caplog)
    train(model, optimizer, batches(2))


def peft_model() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Network(), peft.LoraConfig(target_modules=["up", "mix"], r=2))


def test_adapters_are_not_converted() -> None:
    with pytest.raises(ValueError, match="can be converted"):
        grass.compact(peft_model(), rank=2, targets=[r".*lora_A.*", r".*lora_B.*"])
    model = peft_model()
    adapters = {name: p.requires_grad for name, p in model.named_parameters() if "lora" in name}
    with pytest.raises(ValueError, match="can be converted"):
        grass.compact(model, rank=2)
    assert {name: p.requires_grad for name, p in model.named_parameters() if "lora" in name} == adapters
    assert not compact_layers(model)


def test_peft_after_the_conversion() -> None:
    peft = pytest.importorskip("peft")
    model = Network()
    grass.compact(model, rank=3)
    with pytest.raises(ValueError):  # noqa: PT011  either library may refuse
        GrassAdamW(peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"], r=2)))


def test_an_altered_layer_does_not_disturb_other_optimizers() -> None:
    altered = nn.Sequential(nn.Linear(4, 4))
    grass.compact(altered, rank=2, targets="all-linear")
    nn.utils.parametrizations.weight_norm(altered[0])
    bystander = Network()
    train(bystander, torch.optim.AdamW(bystander.parameters()), batches(2))
    with pytest.raises(RuntimeError, match=r"weight of the converted layer '0' is no longer its parameter"):
        altered(torch.ones(1, 4))


@pytest.mark.parametrize("dim", [0, 1])
def test_from_the_meta_device(dim: int) -> None:
    """Indices have no values there: they are drawn again, and the rows come with the weights."""
    expected = Network()
    plain = expected.state_dict()
    with torch.device("meta"):
        model = Network()
    grass.compact(model, rank=3, dim=dim)
    model.to_empty(device="cpu")
    for layer in compact_layers(model).values():
        assert sorted(set(layer.selected.tolist())) == layer.selected.tolist()
        assert layer.chosen.max() < layer.shape[dim]
        assert not set(layer.selected.tolist()) & set(layer.explored.tolist())
    model.load_state_dict(plain)
    grass.compact(expected, rank=3, dim=dim)
    assert_same_weights(model, expected)
    x = torch.randn(2, 12)
    assert torch.equal(model(x), expected(x))


def test_values_that_are_not_numbers_are_no_changes_from_outside(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    grass.compact(model, rank=2)
    optimizer = grass.GrassAdamW(model, lr=1e-2)
    model(torch.full((2, 8), float("nan"))).sum().backward()
    optimizer.step()
    model(torch.zeros(1, 8))
    assert "was changed through .data" not in caplog.text


@pytest.mark.slow
def test_int8_is_at_hand() -> None:
    command = "import grass; print(grass.int8.plain_state_dict.__name__)"
    printed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "plain_state_dict"


def test_active_rows_that_no_optimizer_has_are_named_once(caplog) -> None:
    """Groups by the endings of names have biases and norms, and no active rows."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    grass.compact(model, rank=0.25)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [[p for name, p in named if name.endswith(ending)] for ending in ("weight", "bias")]
    optimizer = GrassAdamW([{"params": params} for params in groups], lr=0.1)
    caplog.clear()
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert len(caplog.records) == 1
    assert "of 2 layers have gradients, are in no optimizer and do not train: '0', '2'" in messages(caplog)


def test_active_rows_of_other_optimizers_are_not_named(caplog) -> None:
    """As of a GAN's other network; or of a model whose optimizer is gone."""
    networks = [nn.Linear(8, 8) for _ in range(3)]
    for network in networks:
        grass.compact(network, rank=0.25)
    optimizers = [GrassAdamW(network, lr=0.1, seed=seed) for seed, network in enumerate(networks)]
    del optimizers[2]
    gc.collect()
    caplog.clear()
    for network in networks:
        network(torch.randn(4, 8)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not caplog.records
