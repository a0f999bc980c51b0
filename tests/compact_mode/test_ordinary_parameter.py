"""``active`` is an ordinary parameter: forward computes with what it holds, whoever changed it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import grass
from grass import GrassAdamW
from grass.compact_mode import layer as compact_layer
from grass.compact_mode import synced_rows
from tests.compact_mode.networks import Network, batches, compact_layers, loss_of, plain_copy, train

BATCH = batches(1, dtype=torch.float64)[0]
PRECISIONS = [
    pytest.param(dict(dtype=torch.float64), id="float64"),
    pytest.param(dict(dtype=torch.bfloat16, active=torch.float32), id="float32 over bf16"),
]


def network(dtype: torch.dtype = torch.float64, active: torch.dtype | None = None, **options) -> Network:
    model = Network(dtype)
    grass.compact(model, rank=3, explore=2, dtype=active, **options)
    return model


def assert_forward_uses_active(model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    """The weights hold the active rows, and the output is that of a plain model with these weights."""
    x = batches(1, dtype=dtype)[0][0]
    y = model(x)
    for layer in compact_layers(model).values():
        assert layer.holds_active()
    torch.testing.assert_close(y, plain_copy(model)(x))


@pytest.mark.parametrize("write", ["no_grad", "data"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sgd_by_hand(precision: dict, write: str) -> None:
    model = network(**precision)
    data = batches(30, dtype=precision["dtype"])
    losses = []
    for batch in data[:1] * 30:
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None and write == "data":
                p.data -= 0.05 * p.grad
            elif p.grad is not None:
                with torch.no_grad():
                    p -= 0.05 * p.grad
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert_forward_uses_active(model, precision["dtype"])


def test_sgd_by_hand_equals_a_plain_models_on_the_same_columns() -> None:
    model = Network(torch.float64)
    plain = copy.deepcopy(model)
    grass.compact(model, rank=3, explore=0)
    for _ in range(5):
        for network in (model, plain):
            network.zero_grad()
            loss_of(network, BATCH).backward()
        with torch.no_grad():
            for name, layer in compact_layers(model).items():
                weight = plain.get_submodule(name).weight
                weight[:, layer.selected] -= 0.1 * weight.grad[:, layer.selected]
                layer.active -= 0.1 * layer.active.grad
    x = BATCH[0]
    torch.testing.assert_close(model(x), plain(x))


def test_lbfgs_with_columns_is_refused() -> None:
    model = network()
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="convert with dim=0"):
        grass.attach(optimizer, model)


def test_lbfgs() -> None:
    """Several evaluations within one step, each with other values of the rows."""
    model = Network(torch.float64)
    grass.compact(model, rank=3, explore=0, dim=0)  # LBFGS takes gradients by view(), which those of columns lack
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], line_search_fn="strong_wolfe")
    grass.attach(optimizer, model, update_interval=1000)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, BATCH)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_lbfgs_forgets_curvature_at_a_refresh(policy: str) -> None:
    """It belongs to the rows that were selected: as if the optimizer were a new one."""
    losses = []
    for by_hand in (False, True):
        model = Network(torch.float64)
        grass.compact(model, rank=3, explore=0, dim=0)
        optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)
        grass.attach(optimizer, model, update_interval=2, state_policy=policy)

        def closure(model: Any = model) -> torch.Tensor:
            model.zero_grad()
            loss = loss_of(model, BATCH)
            loss.backward()
            return loss.detach()

        for step in range(6):
            losses.append(float(optimizer.step(closure)))
            if by_hand and step % 2:
                optimizer.state.clear()
            assert bool(optimizer.state) == (step % 2 == 0)
    assert losses[:6] == losses[6:]
    assert losses[5] < losses[0]


@pytest.mark.parametrize("restore", ["copy_", "data"])
def test_sharpness_aware_minimization(restore: str) -> None:
    """The second gradient is that of the perturbed rows; the step starts from the restored ones."""
    model = network()
    optimizer = GrassAdamW(model, lr=1e-2)
    loss_of(model, BATCH).backward()
    before = {p: p.detach().clone() for p in model.parameters() if p.grad is not None}
    with torch.no_grad():
        for p in before:
            p.add_(p.grad, alpha=0.1)
    perturbed = plain_copy(model)
    optimizer.zero_grad()
    loss_of(model, BATCH).backward()
    loss_of(perturbed, BATCH).backward()
    for name, layer in compact_layers(model).items():
        expected = perturbed.get_submodule(name).weight.grad[:, layer.selected]
        torch.testing.assert_close(layer.active.grad[:, :3], expected)
    for p, value in before.items():
        if restore == "data":
            p.data = value
        else:
            with torch.no_grad():
                p.copy_(value)
    fresh = network()
    for p, other in zip(model.parameters(), fresh.parameters(), strict=True):
        other.grad = None if p.grad is None else p.grad.clone()
    optimizer.step()
    GrassAdamW(fresh, lr=1e-2).step()
    for ours, theirs in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("write", ["copy_", "data.copy_"])
def test_swapping_averaged_rows_in_and_out(write: str) -> None:
    """An evaluation with other values of the trainable parameters; ``.data`` shows when ``eval()`` is called."""
    model = network()
    expected = model(BATCH[0]).detach()
    kept = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}

    def swap(values: dict) -> None:
        for p, value in values.items():
            if write == "copy_":
                with torch.no_grad():
                    p.copy_(value)
            else:
                p.data.copy_(value)

    swap({p: 0.5 * value for p, value in kept.items()})
    model.eval()
    with torch.no_grad():
        assert not torch.allclose(model(BATCH[0]), expected)
    assert_forward_uses_active(model)
    swap(kept)
    model.train()
    assert torch.equal(model(BATCH[0]), expected)


def test_averaging_all_parameters_averages_the_weights() -> None:
    model = network(torch.float64)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=2)
    averaged, plain = AveragedModel(model), AveragedModel(plain_copy(model))
    for batch in batches(4, dtype=torch.float64):
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
        plain.update_parameters(plain_copy(model))
    x = BATCH[0]
    torch.testing.assert_close(averaged(x), plain(x))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_edited_weight_stays_edited(precision: dict) -> None:
    model = network(**precision)
    optimizer = GrassAdamW(model, lr=0.0, weight_decay=0.0)
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    edited = model.up.weight.detach().clone()
    train(model, optimizer, batches(3, dtype=precision["dtype"]))
    assert torch.equal(model.up.weight, edited)
    torch.testing.assert_close(model.up.active, edited[:, model.up.chosen].to(model.up.active.dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copies_have_changed_rows(precision: dict) -> None:
    model = network(**precision)
    with torch.no_grad():
        model.up.active.mul_(2.0)
    twin, x = copy.deepcopy(model), BATCH[0].to(precision["dtype"])
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_expand_keeps_an_edited_weight(precision: dict) -> None:
    model = network(**precision)
    with torch.no_grad():
        model.up.weight.mul_(2.0)
        model.down.active.mul_(2.0)
    expected = {name: value.clone() for name, value in copy.deepcopy(model).state_dict().items()}
    edited = model.up.weight.detach().clone()
    grass.expand(model)
    assert torch.equal(model.up.weight, edited)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_expand_keeps_edited_codes() -> None:
    model = network(torch.float32)
    grass.expand(model)
    grass.compact(model, rank=3, weights="int8")
    with torch.no_grad():
        model.up.weight.zero_()
    grass.expand(model)
    assert not model.up.weight.any()


def test_state_dict_holds_changed_rows() -> None:
    model = network()
    with torch.no_grad():
        model.up.active.fill_(3.0)
    weight = model.state_dict()["up.weight"]
    assert (weight[:, model.up.chosen] == 3.0).all()


@pytest.mark.parametrize("late", [0, 30])
@pytest.mark.parametrize("way", ["load", "add", "restore"])
def test_a_change_of_weights_through_data_stays(way: str, late: int) -> None:
    """Also long after the first forwards, and where no forward comes before the next step."""
    model = network()
    optimizer = GrassAdamW(model, lr=1e-3, weight_decay=0.0)
    data = batches(late + 2, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, data[:late])
    loss_of(model, data[late]).backward()
    for name, layer in compact_layers(model).items():
        match way:
            case "load":
                layer.weight.data.copy_(torch.full_like(layer.weight, 0.5))
            case "add":
                layer.weight.data += 0.5
            case "restore":
                layer.weight.data.copy_(before[f"{name}.weight"] + 1.0)
    changed = {name: layer.weight.detach().clone() for name, layer in compact_layers(model).items()}
    optimizer.step()
    for name, weight in changed.items():
        assert (model.state_dict()[f"{name}.weight"] - weight).abs().max() < 0.1


def test_rows_that_evaluation_puts_in_through_data_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """As averages by hand are: after ``eval()``, without gradients, long after the first forwards."""
    model = network()
    train(model, GrassAdamW(model, lr=1e-3), batches(20, dtype=torch.float64))
    model.eval()
    for layer in compact_layers(model).values():
        layer.active.data.copy_(2 * layer.active)
    with torch.no_grad():
        assert_forward_uses_active(model)
    assert sum("through .data" in record.getMessage() for record in caplog.records) == 3


@pytest.mark.parametrize("then", ["eval", "forward", "step"])
@pytest.mark.parametrize("share", [1.0, 0.3], ids=["copy", "average"])
def test_parameters_that_are_all_replaced_through_data_stay(share: float, then: str) -> None:
    """As those of a target network are, or of a teacher, long after the first forwards: the weight wins."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 96), nn.Tanh(), nn.Linear(96, 8)).double()
    grass.compact(model, rank=8, explore=16, targets=["2"])
    target, data = copy.deepcopy(model), batches(20, dtype=torch.float64)
    train(target, GrassAdamW(target, lr=1e-3, update_interval=6), data)
    optimizer = GrassAdamW(model, lr=1e-3, update_interval=7)
    train(model, optimizer, data)
    for own, other in zip(target.parameters(), model.parameters(), strict=True):
        own.data.mul_(1 - share).add_(share * other.data)
    expected = {name: layer.weight.detach().clone() for name, layer in compact_layers(target).items()}
    match then:
        case "eval":
            target.eval()
        case "forward":
            loss_of(target, data[0])
        case "step":
            GrassAdamW(target, lr=0.0, weight_decay=0.0).step()
    for name, layer in compact_layers(target).items():
        assert torch.equal(target.state_dict()[f"{name}.weight"], expected[name])
        assert torch.equal(layer.weight[:, layer.chosen], layer.active)


@pytest.mark.parametrize("recurs", [True, False])
def test_where_looking_takes_time_changes_through_data_are_found_after_a_selection(
    recurs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a clamp of weights after every step is, which on a GPU begins long after the first forwards."""
    for module in (synced_rows, compact_layer):
        monkeypatch.setattr(module, "looks_always", lambda layer: False)
    model = network()
    optimizer = GrassAdamW(model, lr=1e-3, update_interval=20)
    for step, batch in enumerate(batches(30, dtype=torch.float64)):
        train(model, optimizer, [batch])
        if step > 9 and (recurs or step == 12):
            for layer in compact_layers(model).values():
                layer.weight.data.copy_(torch.full_like(layer.weight, 0.5))
    told = {record.args for record in caplog.records if "through .data; its active rows follow" in record.getMessage()}
    assert len(told) == (3 if recurs else 0)
    assert all((layer.active - 0.5).abs().max() < 0.1 for layer in compact_layers(model).values()) is recurs


def test_a_step_without_changes_from_outside_copies_nothing(monkeypatch) -> None:
    model = network()
    optimizer = GrassAdamW(model, lr=1e-2)
    train(model, optimizer, batches(2, dtype=torch.float64))
    for layer in compact_layers(model).values():
        monkeypatch.setattr(type(layer), "holds_active", lambda layer: pytest.fail("compared"))
        monkeypatch.setattr(type(layer), "write_back", lambda layer, key=None: pytest.fail("copied"))
    train(model, optimizer, batches(2, dtype=torch.float64))
