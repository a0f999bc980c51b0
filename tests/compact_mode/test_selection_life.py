"""The life of a selection: the first rows, what moments do at a refresh, and refreshes that cannot be made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import (
    DIMS,
    PLAYED,
    POLICIES,
    Network,
    batches,
    compact_layers,
    converted,
    loss_of,
    plain_copy,
    selections,
    train,
)
from tests.reference import ReferenceGrass, uneven_gradients


def first_rows(seed: int) -> list[list[int]]:
    torch.rand(seed + 1)  # the global generator plays no part
    model = Network()
    grass.compact(model, rank=3, explore=0, seed=seed)
    return selections(model)


def later_rows(seed: int) -> list[list[int]]:
    torch.rand(seed + 1)
    model, optimizer = converted(selection="multinomial_norm", **{"update_interval": 2})
    for group in optimizer.param_groups:
        group["seed"] = seed
    train(model, optimizer, batches(2))
    return selections(model)


@pytest.mark.parametrize("rows", [first_rows, later_rows])
def test_seeds(rows) -> None:
    """The first rows follow from the seed of ``compact``, later ones from the optimizer's and the gradients."""
    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


def test_layers_draw_apart() -> None:
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(3)))
    grass.compact(model, rank=5, explore=0)
    assert len({str(rows) for rows in selections(model)}) == 3


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("explore", [0, 3])
def test_optimizers_that_live_shorter_than_an_interval_train_all_columns(explore: int, attached: bool) -> None:
    """As one for each epoch: those with a seed of their own begin with other columns."""
    model, plain = Network(), Network()
    grass.compact(model, rank=3, explore=explore)
    layers, reached = compact_layers(model), set()
    for epoch in range(24):
        before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        if attached:
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
            attachment = grass.attach(optimizer, model, seed=epoch)
        else:
            optimizer = GrassAdamW(model, lr=1e-2, seed=epoch)
        assert all(torch.equal(layer.weight, before[name]) for name, layer in layers.items())
        reached |= set(layers["up"].selected.tolist())
        losses = train(model, optimizer, batches(3))
        assert all(torch.tensor(losses).isfinite())
        if attached:
            attachment.close()
    assert reached == set(range(plain.up.in_features))
    assert not (model.up.weight == plain.up.weight).all(dim=0).any()


def test_an_optimizer_that_goes_on_with_the_same_seed_or_a_saved_state_keeps_its_columns() -> None:
    model, optimizer = converted(update_interval=50)
    train(model, optimizer, batches(3))
    chosen, saved = selections(model), copy.deepcopy(optimizer.state_dict())
    again = GrassAdamW(model, update_interval=50)
    assert selections(model) == chosen
    other = GrassAdamW(model, update_interval=50, seed=again.param_groups[0]["seed"] + 1)
    assert selections(model) != chosen
    other.load_state_dict(saved)
    assert selections(model) == chosen


@pytest.mark.parametrize("dim", DIMS)
def test_calibration(dim: int) -> None:
    """The rows whose gradient is largest; ``.grad`` and the weights stay."""
    model, batch = Network(), batches(1)[0]
    loss_of(model, batches(2)[1]).backward()
    grads, plain = {name: p.grad.clone() for name, p in model.named_parameters()}, copy.deepcopy(model)
    calls = []
    grass.compact(model, rank=3, explore=0, dim=dim, calibration=lambda m: calls.append(m) or loss_of(m, batch))
    assert calls == [model]
    for name, p in model.named_parameters():
        assert p.grad is None if name.endswith("active") else torch.equal(p.grad, grads[name])
    plain.zero_grad()
    loss_of(plain, batch).backward()
    for name, layer in compact_layers(model).items():
        norms = plain.get_submodule(name).weight.grad.norm(dim=1 - dim)
        assert layer.selected.tolist() == sorted(norms.topk(3).indices.tolist())
        assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected))
        assert layer.sketch is None


def test_calibration_that_fails_or_misses_a_layer() -> None:
    model, rows = Network(), first_rows(0)
    with pytest.raises(ZeroDivisionError):
        grass.compact(model, rank=3, explore=0, calibration=lambda m: 1 / 0)
    assert all(layer.sketch is None for layer in compact_layers(model).values())
    grass.calibrate(model, lambda m: m.up(batches(1)[0][0]).square().sum())
    assert selections(model)[0] != rows[0]
    assert selections(model)[1:] == rows[1:], "layers that the loss does not depend on keep their rows"


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_moments_across_refreshes(policy: str, dim: int, warmup: int) -> None:
    """Given rows and gradients, against the float64 reference: rows kept, dropped, and chosen again much later."""
    options = dict(lr=1e-2, update_interval=3, state_policy=policy, warmup_after_refresh=warmup, weight_decay=0.1)
    layer = nn.Linear(7, 6, bias=False, dtype=torch.float64)
    oracle = ReferenceGrass(layer.weight, dim=dim, **options)
    grass.compact(layer, rank=3, explore=0, dim=dim)
    rows = [layer.selected.clone(), *(torch.tensor(r) for r in ([0, 1, 2], [1, 2, 5], [3, 4, 5], [0, 1, 5], [0, 1, 5]))]
    PLAYED.append(iter(rows[1:]))
    optimizer = GrassAdamW(layer, selection="playback", **options)
    for step, gradient in enumerate(uneven_gradients((6, 7), 15)):
        if oracle.refresh_due:
            assert layer.selected.tolist() == rows[step // 3].tolist()
            oracle.choose(rows[step // 3], None)
        oracle.step(gradient)
        optimizer.zero_grad()
        layer(torch.eye(7, dtype=torch.float64)).backward(gradient.t())  # the weight's gradient is then ``gradient``
        torch.testing.assert_close(layer.active.grad, gradient.index_select(dim, layer.selected))
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), oracle.weight, rtol=1e-6, atol=1e-8)  # fp32 row step counts
    PLAYED.pop()


@pytest.mark.parametrize("spoilt", [0.0, torch.nan, torch.inf], ids=["zero", "nan", "inf"])
@pytest.mark.parametrize("whole", [True, False], ids=["everywhere", "in one row"])
def test_a_refresh_that_cannot_be_made_stays_due(spoilt: float, whole: bool) -> None:
    """The rows stay, the next step gathers again, and chooses as if nothing had been."""
    model, optimizer = converted(refresh="exact")
    data, first = batches(5), selections(model)
    train(model, optimizer, data[:3])
    optimizer.zero_grad()
    loss_of(model, data[3]).backward()
    for layer in compact_layers(model).values():
        rows = slice(None) if whole or spoilt == 0 else slice(1)
        layer.sketch.grad[rows] = spoilt
    optimizer.step()
    assert selections(model) == first
    dense = plain_copy(model)
    loss_of(dense, data[4]).backward()
    assert all(layer.sketch is not None for layer in compact_layers(model).values())
    train(model, optimizer, data[4:])
    for name, layer in compact_layers(model).items():
        norms = dense.get_submodule(name).weight.grad.norm(dim=0)
        assert layer.selected.tolist() == sorted(norms.topk(3).indices.tolist())
        assert layer.sketch is None
        assert optimizer.state[layer.active]["refreshes"] == 2


def test_a_refresh_without_any_backward_stays_due() -> None:
    """``.grad`` set by hand: the step is made, but there is nothing to choose by."""
    model, optimizer = converted(update_interval=2)
    first = selections(model)
    for _ in range(3):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.ones_like(p)
        optimizer.step()
    assert selections(model) == first
    train(model, optimizer, batches(1))
    assert selections(model) != first


def test_changing_the_interval_while_training() -> None:
    """The group's value counts, from the next step on."""
    model, optimizer = converted(update_interval=100)
    first = selections(model)
    train(model, optimizer, batches(5))
    optimizer.param_groups[0]["update_interval"] = 7
    train(model, optimizer, batches(1))
    assert compact_layers(model)["up"].sketch is not None
    train(model, optimizer, batches(1))
    assert selections(model) != first


def test_fine_rows_follow_the_weight_at_a_refresh() -> None:
    """Rows that are new start at the weight's values; rows that stay keep what the weight cannot hold."""
    layer = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
    grass.compact(layer, rank=2, explore=0, dtype=torch.float32)
    layer.select(torch.tensor([1, 3]))
    fine: Tensor = layer.active.detach() + 2**-12
    with torch.no_grad():
        layer.active.copy_(fine)
    layer.write_back()
    layer.select(torch.tensor([3, 4]))
    assert torch.equal(layer.active[:, 0], fine[:, 1])
    assert torch.equal(layer.active[:, 1], layer.weight[:, 4].float())
