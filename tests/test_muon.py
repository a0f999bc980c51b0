"""``GrassMuon`` is torch's Muon of the active rows and AdamW of the rest, as one optimizer."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import grass
from grass import GrassMuon
from grass.diagnostics import SelectionHistory
from grass.memory import state_bytes
from tests.compact_mode.networks import Network, assert_same_weights, batches, loss_of, through_file, train


def converted(dtype: torch.dtype = torch.float32, **options: object) -> tuple[Network, GrassMuon]:
    """Rank 3 of layers of 12, 20 and 16 columns: three values of ``n / (r + q)``."""
    model = Network(dtype)
    grass.compact(model, rank=3)
    return model, GrassMuon(model, **{"lr": 1e-2, "update_interval": 3, **options})


def by_hand(lr: float, decay: float) -> tuple[Network, list[torch.optim.Optimizer]]:
    """The same with torch's own optimizers and an attachment."""
    model = Network()
    grass.compact(model, rank=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    columns = [layer.active for layer in (model.up, model.mix, model.down)]
    others = [p for p in trained if all(p is not column for column in columns)]
    muon = torch.optim.Muon(
        [{"params": [column]} for column in columns], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    model.attachment = grass.attach(muon, model, scale="auto", update_interval=3)
    return model, [muon, torch.optim.AdamW(others, lr=lr, weight_decay=decay)]


def test_equals_both_optimizers_and_an_attachment() -> None:
    """Bit for bit in Muon's part; AdamW's kernel is another than torch's, and its sums round in another order."""
    model, optimizer = converted(weight_decay=0.1)
    twin, optimizers = by_hand(1e-2, 0.1)
    every = [optimizer, *optimizers]
    schedules = [torch.optim.lr_scheduler.LinearLR(each, total_iters=6) for each in every]
    for batch in batches(10):
        for each, steps in ((model, [optimizer]), (twin, optimizers)):
            loss_of(each, batch).backward()
            for step in steps:
                step.step()
                step.zero_grad()
        for schedule in schedules:
            schedule.step()
    expected = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=1e-6)  # float32: some steps' last bits
    for ours, theirs in zip((model.up, model.mix, model.down), (twin.up, twin.mix, twin.down), strict=True):
        assert torch.equal(ours.selected, theirs.selected)


def test_muon_of_whole_matrices() -> None:
    """``muon=True`` takes matrices that are not converted; with nothing converted it is torch's Muon and AdamW."""
    model, twin = Network(), Network()
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == which] for which in (True, False))
    optimizer = GrassMuon(
        [{"params": matrices, "muon": True, "lr": 2e-2}, {"params": rest, "betas": (0.8, 0.9)}], weight_decay=0.0
    )
    muon = torch.optim.Muon(
        [p for p in twin.parameters() if p.ndim == 2], lr=2e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([p for p in twin.parameters() if p.ndim < 2], betas=(0.8, 0.9), weight_decay=0.0)
    for batch in batches(4):
        train(model, optimizer, [batch])
        loss_of(twin, batch).backward()
        for step in (muon, adamw):
            step.step()
            step.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # as above
    assert optimizer.attachment is None


@pytest.mark.parametrize("stopped_after", [0, 1, 4], ids=lambda steps: f"{steps} steps")
def test_goes_on_bit_for_bit(stopped_after: int) -> None:
    """From files, after other steps; before the first step the state has the selection alone."""
    data, (whole, optimizer) = batches(9), converted()
    train(whole, optimizer, data)
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    stopped, older = converted()
    train(stopped, older, data[:stopped_after])
    saved = through_file({"model": stopped.state_dict(), "optimizer": older.state_dict()})
    resumed, newer = converted()
    train(resumed, newer, batches(2, seed=3))
    resumed.load_state_dict(saved["model"])
    newer.load_state_dict(saved["optimizer"])
    train(resumed, newer, data[stopped_after:])
    assert_same_weights(resumed, whole)


def test_saved_settings_hold(caplog: pytest.LogCaptureFixture) -> None:
    """As ``GrassAdamW``'s: those that the resumed optimizer was built with are replaced, and a warning names them."""
    given = {"seed": 4, "selection": "balanced", "scale": 2.0}
    data, (whole, optimizer) = batches(9), converted(**given)
    train(whole, optimizer, data)
    stopped, older = converted(**given)
    train(stopped, older, data[:4])
    resumed, newer = converted(scale=1.0, update_interval=50)
    resumed.load_state_dict(stopped.state_dict())
    newer.load_state_dict(through_file(older.state_dict()))
    train(resumed, newer, data[4:])
    assert_same_weights(resumed, whole)
    (warning,) = [record.message for record in caplog.records if "load_state_dict replaces" in record.message]
    assert "seed=0 by 4" in warning
    assert "update_interval=50 by 3" in warning
    assert "scale=1.0 by 2.0" in warning


def test_settings_changed_in_the_loop() -> None:
    model, optimizer = converted(update_interval=100)
    first = model.mix.selected.clone()
    for group in optimizer.param_groups:
        group["update_interval"] = 2
    train(model, optimizer, batches(2))
    assert not torch.equal(model.mix.selected, first)
    optimizer.param_groups[0]["update_interval"] = 5
    with pytest.raises(ValueError, match="Groups of active rows have different 'update_interval': they share it"):
        optimizer.step()
    for group in optimizer.param_groups:
        group["update_interval"] = 0
    with pytest.raises(ValueError, match="Invalid update_interval=0"):
        optimizer.step()


def test_one_cycle_leaves_momenta() -> None:
    model, optimizer = converted()
    with pytest.raises(ValueError, match="cycle_momentum"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False)
    for batch in batches(3):
        train(model, optimizer, [batch])
        schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {schedule.get_last_lr()[0]}


def test_a_step_after_expand() -> None:
    model, optimizer = converted()
    train(model, optimizer, batches(1))
    grass.expand(model)
    with pytest.raises(RuntimeError, match=r"grass.expand\(\) has replaced the active rows"):
        optimizer.step()


def test_parameters_unfrozen_later_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Network()
    model.norm.requires_grad_(False)
    grass.compact(model, rank=3)
    optimizer = GrassMuon(model)
    train(model, optimizer, batches(1))
    model.norm.requires_grad_(True)
    train(model, optimizer, batches(1))
    assert "'norm.weight', 'norm.bias'" in caplog.text


def test_groups_and_state_are_those_of_both() -> None:
    model, optimizer = converted()
    assert [group["muon"] for group in optimizer.param_groups] == [True, True, True, False]
    train(model, optimizer, batches(4))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in optimizer.state} == {id(p) for p in trained}
    columns = sum(layer.active.numel() for layer in (model.up, model.mix, model.down))
    others = sum(p.numel() for p in trained) - columns
    indices = 8 * 3 * 3  # which three columns of three layers
    assert state_bytes(optimizer).device == 4 * (columns + 2 * others + 4) + indices  # and steps of four tensors
    history = SelectionHistory(optimizer)
    train(model, optimizer, batches(1))
    assert 0 < history.record()["coverage"] < 1
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, batches(1))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name for name in moved if name.endswith("weight")} == {"mix.weight", "down.weight"}


@pytest.mark.parametrize("number", [0, -1], ids=["active rows", "the rest"])
@pytest.mark.parametrize("how", ["taken out", "another list", "another dict"])
def test_groups_changed_by_hand(number: int, how: str) -> None:
    """As with any optimizer of torch: parameters of a group that was taken out stand still, and others train on."""
    model, optimizer = converted()
    train(model, optimizer, batches(2))
    held = {id(p) for p in optimizer.param_groups[number]["params"]}
    if how == "taken out":
        optimizer.param_groups.pop(number)
    elif how == "another list":
        optimizer.param_groups = [g for g in optimizer.param_groups if not {id(p) for p in g["params"]} & held]
    else:
        optimizer.param_groups[number] = {**optimizer.param_groups[number], "lr": 0.0}
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, batches(4))
    layers = {id(layer.active): f"{name}.weight" for name, layer in optimizer.attachment.layers.items()}
    names = {id(p): name for name, p in model.named_parameters()}
    still = {layers.get(key, names[key]) for key in held}
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trained = {layers.get(id(p), names[id(p)]) for p in model.parameters() if p.requires_grad}
    assert moved == trained - still


def test_groups_put_there_by_hand() -> None:
    model, optimizer = converted()
    optimizer.param_groups.append({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="put there by hand: call add_param_group"):
        optimizer.step()


@pytest.mark.parametrize("how", ["clear", "another dict", "delete", "pop", "empty"])
def test_moments_reset_by_hand(how: str) -> None:
    """The next step is that of an optimizer without moments, of active rows and of the rest."""
    model, optimizer = converted(selection="top_r", weight_decay=0.0)
    train(model, optimizer, batches(4))
    if how == "clear":
        optimizer.state.clear()
    elif how == "another dict":
        optimizer.state = defaultdict(dict)
    for p in list(optimizer.state):
        if how == "delete":
            del optimizer.state[p]
        elif how == "pop":
            assert optimizer.state.pop(p, None)
            assert optimizer.state.pop(p, None) is None
        else:
            optimizer.state[p] = {}
            assert set(optimizer.state[p]) <= {"selection"}
    assert not any(set(state) - {"selection"} for state in optimizer.state.values())
    fresh_muon = torch.zeros_like(model.mix.active)
    loss_of(model, batches(5)[-1]).backward()
    gradient, norms = model.mix.selected_part(model.mix.active.grad).clone(), model.norm.weight.detach().clone()
    optimizer.step()
    model.mix.selected_part(fresh_muon).copy_(0.05 * gradient)  # 1 - momentum
    torch.testing.assert_close(optimizer.state[model.mix.active]["momentum_buffer"], fresh_muon)
    moved = (model.norm.weight - norms).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2), rtol=1e-3, atol=0.0)  # Adam's first step
    with pytest.raises(KeyError, match="No parameter of this GrassMuon"):
        optimizer.state[nn.Parameter(torch.ones(2))] = {}
    with pytest.raises(KeyError):
        del optimizer.state[nn.Parameter(torch.ones(2))]


def test_a_flattened_state_goes_on_bit_for_bit() -> None:
    """As distributed checkpoints of pipelines are: names of values are joined to names of parameters."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = converted(selection="top_r")
    train(model, optimizer, batches(4))
    model_state, state = (through_file(s) for s in get_state_dict(model, optimizer, options=options))
    again, its_optimizer = converted(selection="top_r")
    set_state_dict(again, its_optimizer, model_state_dict=model_state, optim_state_dict=state, options=options)
    for each, of in ((model, optimizer), (again, its_optimizer)):
        train(each, of, batches(9)[4:])
    assert_same_weights(model, again)


def test_norms_in_half_precision_train() -> None:
    """A step of a norm's weight is far below bfloat16's spacing near 1, which is 2**-7."""
    model, optimizer = converted(torch.bfloat16, lr=1e-4)
    train(model, optimizer, batches(60, dtype=torch.bfloat16))
    assert bool((model.norm.weight != 1).any())


def test_closure_and_added_groups() -> None:
    model, optimizer = converted()
    extra = nn.Parameter(torch.ones(20))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.param_groups[-1]["muon"] is False
    batch = batches(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch) + extra.sum()
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
    assert bool((extra < 1).all())
    model.down.requires_grad_(False)
    for refused in (model.mix.active, extra):
        with pytest.raises(ValueError, match=r"holds active rows|some parameters appear"):
            optimizer.add_param_group({"params": [refused]})
    with pytest.raises(ValueError, match="Invalid group: it is empty"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(TypeError, match="param_group must be a dict, got list"):
        optimizer.add_param_group([extra])
    with pytest.raises(ValueError, match="Muon trains"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "muon": True})
    assert len(optimizer.param_groups) == 5


def test_a_model_without_other_parameters() -> None:
    model = nn.Sequential(nn.Linear(12, 8, bias=False))
    grass.compact(model, rank=3, targets="all-linear")
    optimizer = GrassMuon(model.parameters(), lr=1e-2, nesterov=False, momentum=0.5)
    train(model, optimizer, batches(3))
    saved = through_file(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert [group["nesterov"] for group in optimizer.param_groups] == [False]
    with pytest.raises(ValueError, match="the first that AdamW would train"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_gradient_scaler_skips_an_overflow() -> None:
    model, optimizer = converted()
    train(model, optimizer, batches(1))
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * loss_of(model, batches(1)[0])).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.mix.weight, before["mix.weight"]) == (factor != 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum": 1.0}, ValueError, r"Invalid momentum=1.0: must be a number in \[0, 1\)"),
        ({"scale": "max"}, TypeError, "scale"),
        ({"update_interval": 0}, ValueError, "Invalid update_interval=0"),
        ({"state_policy": "bank"}, ValueError, "must be 'reset' or 'keep' under another optimizer"),
        ({"lr": -1.0}, ValueError, "Invalid lr=-1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        converted(**options)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lr", -0.1, ValueError),
        ("weight_decay", -1.0, ValueError),
        ("momentum", 5, ValueError),
        ("nesterov", "no", TypeError),
    ],
)
def test_a_value_of_a_group_that_is_changed_to_one_out_of_range(name: str, value: object, error: type) -> None:
    model, optimizer = converted()
    optimizer.param_groups[0][name] = value
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    with pytest.raises(error, match=f"Invalid {name}="):
        optimizer.step()


def test_it_writes_rows_back_and_is_expanded() -> None:
    model, optimizer = converted()
    with pytest.raises(ValueError, match="GrassMuon writes active rows back already"):
        grass.attach(optimizer, model)
    grass.expand(model)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"grass.expand\(\) has replaced the active rows"):
        optimizer.step()


def test_wrong_parameters() -> None:
    model = Network()
    with pytest.raises(ValueError, match=r"has no active rows: convert it first"):
        GrassMuon(model)
    with pytest.raises(ValueError, match=r"GrassMuon got no active rows: call grass.compact\(model, rank=...\)"):
        GrassMuon(model.parameters())
    with pytest.raises(TypeError, match="got a tensor"):
        GrassMuon(model.up.weight)
    grass.compact(model, rank=3)
    with pytest.raises(TypeError, match="A group of GrassMuon has no setting 'seed'"):
        GrassMuon([{"params": [p for p in model.parameters() if p.requires_grad], "seed": 1}])
    with pytest.raises(TypeError, match="A group of GrassMuon has no setting 'rank': must be one of params, lr"):
        GrassMuon([{"params": [p for p in model.parameters() if p.requires_grad], "rank": 0.25}])


def test_states_of_others_are_refused() -> None:
    """Nothing has changed afterwards."""
    model, optimizer = converted()
    train(model, optimizer, batches(2))
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    other = Network()
    grass.compact(other, rank=3)
    adamw = grass.GrassAdamW(other)
    train(other, adamw, batches(2))
    with pytest.raises(ValueError, match=r"State of groups of .* load what GrassMuon.state_dict\(\) gave"):
        optimizer.load_state_dict(adamw.state_dict())
    bare = {**before, "state": {key: {} for key in before["state"]}}
    with pytest.raises(ValueError, match=r"The state has no selection of parameters \[0, 1, 2\]"):
        optimizer.load_state_dict(bare)
    wider = Network()
    grass.compact(wider, rank=3, explore=2)
    foreign = GrassMuon(wider, scale=2.0)
    train(wider, foreign, batches(1))
    same_groups = GrassMuon(model, scale=2.0)
    with pytest.raises(ValueError, match="State of active rows with explore=2 for 'up' with explore=3"):
        same_groups.load_state_dict(foreign.state_dict())
    assert not same_groups.state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


def test_no_copies() -> None:
    with pytest.raises(TypeError, match=r"GrassMuon cannot be copied or pickled: build a new one"):
        copy.deepcopy(converted()[1])


def test_log_line_has_the_scales(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="grass"):
        converted()
    assert "projected weights: lr x 2 to 3.33 (scale='auto'); other parameters: lr" in caplog.text
