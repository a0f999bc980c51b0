"""Selection history against what a plain loop can work out for itself."""

import json
import math

import numpy as np
import pytest
import torch

import grass
from grass.diagnostics import SelectionHistory, energy, turnover
from tests.compact_mode.networks import Network, batches, compact_layers, converted, loss_of, through_file


def mask(indices, size):
    return torch.zeros(size, dtype=torch.bool).index_fill(0, torch.as_tensor(indices), True)


def gradient_norms(model, batch, dim):
    """Norms of the full gradients of a plain copy, by layer."""
    plain = Network()
    plain.load_state_dict(model.state_dict())
    loss_of(plain, batch).backward()
    return {name: plain.get_submodule(name).weight.grad.norm(dim=1 - dim) for name in compact_layers(model)}


def dense(dim=0, **options):
    model = Network()
    groups = grass.param_groups(model, rank=3, dim=dim)
    return model, grass.GrassAdamW(groups, lr=1e-2, **{**grass.PAPER, "update_interval": 4, **options})


def step(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()


def test_measures_by_hand():
    before, after = mask([0, 1, 2, 3], 8), mask([2, 3, 4], 8)
    assert turnover(before, after) == pytest.approx(1 / 3)
    assert energy(torch.tensor([3.0, 0, 0, 4.0]), mask([3], 4)) == pytest.approx(16 / 25)
    assert math.isnan(energy(torch.zeros(4), mask([3], 4)))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("selection", ["top_r", "uniform"])
def test_dense_mode_measures_the_gradient_of_every_step(dim, selection):
    model, optimizer = dense(dim, selection=selection)
    history, ever, before = SelectionHistory(optimizer), {}, {}
    for number, batch in enumerate(batches(9), start=1):
        step(model, optimizer, batch)
        record = history.record()
        expected = {"turnover": [], "energy": [], "coverage": []}
        for p in optimizer.param_groups[0]["params"]:
            rows = set(optimizer.state[p]["indices"].tolist())
            squares = p.grad.square().sum(1 - dim)
            ever.setdefault(p, set()).update(rows)
            if number % 4 == 1:
                before.setdefault(p, [rows]).append(rows)
            old, new = before[p][-2:]
            expected["turnover"].append(len(new - old) / len(new))
            expected["energy"].append((squares[list(rows)].sum() / squares.sum()).item())
            expected["coverage"].append(len(ever[p]) / p.shape[dim])
        assert record == pytest.approx({key: np.mean(values) for key, values in expected.items()}, rel=1e-5)
        optimizer.zero_grad()
    assert record["turnover"] > 0


def test_compact_mode_under_a_rule_without_norms_has_no_energy():
    model, optimizer = converted(selection="uniform", update_interval=2)
    history = SelectionHistory(optimizer)
    for batch in batches(5):
        step(model, optimizer, batch)
        record = history.record()
        assert math.isnan(record["energy"])
    assert record["turnover"] > 0


@pytest.mark.parametrize("dim", [0, 1])
def test_compact_mode_measures_the_gradient_that_chose(dim):
    model, optimizer = converted(dim=dim, refresh="exact")
    history = SelectionHistory(optimizer)
    first = {name: layer.selected.tolist() for name, layer in compact_layers(model).items()}
    for number, batch in enumerate(batches(6), start=1):
        norms = gradient_norms(model, batch, dim)
        optimizer.zero_grad()
        step(model, optimizer, batch)
        record = history.record()
        if number < 4:
            assert math.isnan(record["energy"])
            assert record["turnover"] == 0
        if number == 4:
            chosen = {name: norms[name].topk(3).indices.tolist() for name in first}
            at_refresh = {
                "turnover": np.mean([len({*chosen[n]} - {*first[n]}) / 3 for n in first]),
                "energy": np.mean([energy(norms[n], mask(chosen[n], len(norms[n]))) for n in first]),
                "coverage": np.mean([len({*chosen[n]} | {*first[n]}) / len(norms[n]) for n in first]),
            }
        if number >= 4:
            assert record == pytest.approx(at_refresh, rel=1e-4)


def test_sketch_estimates_the_exact_energy():
    model, optimizer = converted(rank=6, dim=1, sketch_size=8)
    history = SelectionHistory(optimizer)
    for batch in batches(4, size=64):
        norms = gradient_norms(model, batch, 1)
        optimizer.zero_grad()
        step(model, optimizer, batch)
    exact = np.mean(
        [energy(norms[n], mask(layer.selected, len(norms[n]))) for n, layer in compact_layers(model).items()]
    )
    assert history.record()["energy"] == pytest.approx(exact, abs=0.15)


@pytest.mark.parametrize("make", [dense, converted], ids=["dense", "compact"])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_mask_is_what_each_step_trained(make, interval):
    model, optimizer = make(selection="uniform", update_interval=interval, weight_decay=0.0)
    history = SelectionHistory(optimizer)
    weights = {name: model.get_submodule(name).weight for name in ("up", "mix", "down")}
    dim = 0 if make is dense else 1
    moved = {name: [] for name in weights}
    for batch in batches(7):
        old = {name: weight.detach().clone() for name, weight in weights.items()}
        step(model, optimizer, batch)
        optimizer.zero_grad()
        for name, weight in weights.items():
            moved[name].append((weight.detach() != old[name]).any(1 - dim).numpy())
    assert history.layers() == list(weights)
    for name in weights:
        np.testing.assert_array_equal(history.mask(name), moved[name])


def test_refreshes_between_two_records_are_seen():
    (often_model, often), (rarely_model, rarely) = (converted(selection="uniform", update_interval=2) for _ in "ab")
    histories = SelectionHistory(often), SelectionHistory(rarely)
    for batch in batches(8):
        step(often_model, often, batch)
        step(rarely_model, rarely, batch)
        recorded = histories[0].record()
    assert histories[1].record() == recorded


@pytest.mark.parametrize("make", [dense, converted], ids=["dense", "compact"])
def test_table_has_every_layer_at_every_record(make):
    model, optimizer = make()
    history = SelectionHistory(optimizer)
    for batch in batches(5):
        step(model, optimizer, batch)
        means = history.record()
    table = history.table()
    assert list(table.columns) == ["step", "layer", "turnover", "energy", "coverage"]
    assert table["step"].tolist() == np.repeat(range(1, 6), 3).tolist()
    assert table["layer"].tolist() == ["up", "mix", "down"] * 5
    last = table[table["step"] == 5]
    assert last[["turnover", "energy", "coverage"]].mean().to_dict() == pytest.approx(means)


def test_any_attached_optimizer():
    model = Network()
    grass.compact(model, rank=3, explore=0, dim=1)
    rows = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(rows, lr=0.1)
    grass.attach(optimizer, model, update_interval=2, selection="multinomial_norm")
    history = SelectionHistory(optimizer)
    for batch in batches(4):
        before = {name: layer.selected.clone() for name, layer in compact_layers(model).items()}
        step(model, optimizer, batch)
    record = history.record()
    layers = compact_layers(model)
    expected = [len({*layers[n].selected.tolist()} - {*before[n].tolist()}) / 3 for n in layers]
    assert record["turnover"] == pytest.approx(np.mean(expected))
    assert 0 < record["energy"] < 1
    assert all(name.startswith("parameter ") for name in history.layers())


def test_a_row_drawn_twice_counts_once():
    model, optimizer = dense(selection="multinomial_norm", replacement=True)
    history = SelectionHistory(optimizer)
    step(model, optimizer, batches(1)[0])
    weights = optimizer.param_groups[0]["params"]
    distinct = [len(set(optimizer.state[p]["indices"].tolist())) for p in weights]
    assert min(distinct) < 3
    assert history.record()["coverage"] == pytest.approx(
        np.mean([d / len(p) for d, p in zip(distinct, weights, strict=True)])
    )


def test_without_gradients_the_last_energy_stays():
    model, optimizer = dense()
    history = SelectionHistory(optimizer)
    step(model, optimizer, batches(1)[0])
    recorded = history.record()
    optimizer.zero_grad()
    assert history.record() == recorded


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_gradients_that_tell_nothing_leave_the_last_energy(value):
    model, optimizer = dense()
    history = SelectionHistory(optimizer)
    step(model, optimizer, batches(1)[0])
    recorded = history.record()
    for p in model.parameters():
        p.grad.fill_(value)
    assert history.record() == recorded


def test_following_changes_nothing_and_ends():
    (watched_model, watched), (alone_model, alone) = converted(), converted()
    history = SelectionHistory(watched, keep=False)
    for batch in batches(9):
        step(watched_model, watched, batch)
        step(alone_model, alone, batch)
        history.record()
    for ours, theirs in zip(watched_model.parameters(), alone_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert through_file(watched.state_dict())["state"].keys() == alone.state_dict()["state"].keys()
    assert history.table().empty
    with pytest.raises(ValueError, match=r"No selections of 'up' \(keep=False\)"):
        history.mask("up")
    recorded = history.record()
    history.close()
    for batch in batches(5, seed=8):
        step(watched_model, watched, batch)
    assert history.record() == recorded


def test_a_resumed_run_is_followed():
    model, optimizer = converted(selection="uniform")
    for batch in batches(5):
        step(model, optimizer, batch)
    resumed_model, resumed = converted(selection="uniform", seed=1)
    history = SelectionHistory(resumed)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    step(resumed_model, resumed, batches(6)[-1])
    assert history.record()["coverage"] == pytest.approx(np.mean([3 / 12, 3 / 20, 3 / 16]))


@pytest.mark.parametrize("make", [dense, converted], ids=["dense", "compact"])
def test_a_history_goes_on_in_a_resumed_run(make):
    """Through JSON: records, and the mask from there on, are those of a history that was never interrupted."""
    data = batches(9)
    model, optimizer = make(selection="multinomial_norm", update_interval=2)
    whole = SelectionHistory(optimizer)
    for batch in data[:5]:
        step(model, optimizer, batch)
    whole.record()
    resumed_model, resumed = make(selection="multinomial_norm", update_interval=2)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    history = SelectionHistory(resumed)
    history.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for batch in data[5:]:
        for each, its in ((model, optimizer), (resumed_model, resumed)):
            its.zero_grad()
            step(each, its, batch)
        assert history.record() == pytest.approx(whole.record(), nan_ok=True)
    for layer in whole.layers():
        assert (history.mask(layer)[5:] == whole.mask(layer)[5:]).all()


def test_misuse():
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got Linear"):
        SelectionHistory(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="AdamW selects no rows"):
        SelectionHistory(torch.optim.AdamW(Network().parameters()))
    with pytest.raises(ValueError, match="GrassAdamW selects no rows"):
        SelectionHistory(grass.GrassAdamW(Network().parameters()))
    history = SelectionHistory(dense()[1])
    with pytest.raises(RuntimeError, match=r"before the first optimizer.step\(\)"):
        history.record()
    with pytest.raises(ValueError, match="No selections of 'up'"):
        history.mask("up")
