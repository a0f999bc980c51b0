"""Any torch optimizer over the active rows: ``grass.attach`` writes back and refreshes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import Attachment
from tests.compact_mode.networks import (
    DIMS,
    Network,
    assert_same_weights,
    batches,
    compact_layers,
    converted,
    loss_of,
    selections,
    through_file,
    train,
)
from tests.reference import relative_difference

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9),
    "Muon": lambda p: torch.optim.Muon([t for t in p if t.ndim == 2], lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def attached(
    make: Make, dtype: torch.dtype = torch.float32, active: torch.dtype | None = None, seed: int = 0, **options: object
) -> tuple[Network, torch.optim.Optimizer, Attachment]:
    model = Network(dtype)
    grass.compact(model, rank=3, explore=0, dtype=active, seed=seed)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, grass.attach(optimizer, model, **{"update_interval": 4, **options})


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_trains(make: Make) -> None:
    """The loss falls, rows are written back after every step and change at every refresh."""
    model, optimizer, _ = attached(make)
    data, first = batches(1) * 30, selections(model)
    losses = []
    for batch in data:
        losses += train(model, optimizer, [batch])
        for name, layer in compact_layers(model).items():
            assert torch.equal(layer.active, layer.weight.index_select(1, layer.selected)), name
    assert losses[-1] < 0.8 * losses[0]
    assert all(rows != old for rows, old in zip(selections(model), first, strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dim", DIMS)
def test_all_rows_are_the_plain_model(make: Make, dim: int) -> None:
    """At full rank without a refresh, or with moments kept, it is that optimizer on the plain model."""
    plain, data = Network(torch.float64), batches(12, dtype=torch.float64)
    train(plain, make(list(plain.parameters())), data)
    for policy, interval in (("reset", 100), ("keep", 3)):
        model = Network(torch.float64)
        grass.compact(model, rank=1.0, explore=0, dim=dim)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        grass.attach(optimizer, model, state_policy=policy, update_interval=interval)
        train(model, optimizer, data)
        # Muon orthogonalises in bfloat16, where another order of sums shows.
        tolerance = 1e-2 if isinstance(optimizer, torch.optim.Muon) else 1e-11
        for name, layer in compact_layers(model).items():
            assert relative_difference(layer.weight, plain.get_submodule(name).weight) < tolerance, name


@pytest.mark.parametrize("stop", [3, 4, 6], ids=lambda stop: f"after {stop}")
@pytest.mark.parametrize("active", [None, torch.float32], ids=["bf16", "fp32 over bf16"])
@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW"]], ids=["SGD", "AdamW"])
def test_resume(make: Make, policy: str, active: torch.dtype | None, stop: int) -> None:
    """Bit-exact through a file: model, optimizer, attachment."""
    options = dict(dtype=torch.bfloat16, active=active, state_policy=policy, selection="multinomial_norm")
    data = batches(stop + 9, dtype=torch.bfloat16)
    model, optimizer, attachment = attached(make, **options)
    train(model, optimizer, data[:stop])
    saved = through_file([model.state_dict(), optimizer.state_dict(), attachment.state_dict()])
    other, other_optimizer, other_attachment = attached(make, seed=5, **options)
    for part, state in zip((other, other_optimizer, other_attachment), saved, strict=True):
        part.load_state_dict(state)
    assert_same_weights(other, model)
    assert train(model, optimizer, data[stop:]) == train(other, other_optimizer, data[stop:])
    assert_same_weights(other, model)
    again = other_attachment.state_dict()
    for name, state in attachment.state_dict().items():
        assert {k: v for k, v in state.items() if not isinstance(v, Tensor)}.items() <= again[name].items()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_going_back_to_before_the_first_step(make: Make) -> None:
    model, data = Network(), batches(12)
    grass.compact(model, rank=3, explore=2)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    attachment = grass.attach(optimizer, model, update_interval=4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    weights = []
    for _ in range(2):
        train(model, optimizer, data)
        weights.append(copy.deepcopy(model.state_dict()))
        for part, state in zip((model, optimizer, attachment), copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_saved_selection_is_not_shared() -> None:
    model, optimizer, attachment = attached(OPTIMIZERS["SGD"])
    saved, first = attachment.state_dict(), selections(model)
    train(model, optimizer, batches(9))
    assert selections(model) != first
    attachment.load_state_dict(saved)
    assert selections(model) == first
    train(model, optimizer, batches(9))
    assert [state["indices"].tolist() for state in saved.values()] == first


def test_state_of_other_layers() -> None:
    _, _, attachment = attached(OPTIMIZERS["SGD"])
    state = attachment.state_dict()
    state["elsewhere"] = state.pop("mix")
    with pytest.raises(ValueError, match=r"elsewhere.*mix"):
        attachment.load_state_dict(state)


@pytest.mark.parametrize("by_weight", [False, True])
def test_a_layer_that_the_optimizer_gets_later_is_refused(by_weight: bool) -> None:
    model = Network()
    grass.compact(model, rank=3)
    model.up.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    attachment = grass.attach(optimizer, model)
    train(model, optimizer, batches(2))
    (model.up.weight if by_weight else model.up).requires_grad_(True)
    optimizer.add_param_group({"params": list(model.up.parameters())})
    with pytest.raises(RuntimeError, match="has got active rows of 'up' since"):
        train(model, optimizer, batches(1))
    attachment.close()
    model.up.requires_grad_(True)
    grass.attach(optimizer, model)
    before = model.up.weight.detach().clone()
    train(model, optimizer, batches(1))
    assert not torch.equal(model.up.weight, before)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor])
def test_a_group_that_is_taken_out_stands_still(make: type[torch.optim.Optimizer]) -> None:
    """As with any optimizer of torch, over a refresh; other layers train on, and the state is saved."""
    model = Network()
    grass.compact(model, rank=3)
    optimizer = make([{"params": [layer.active]} for layer in compact_layers(model).values()], lr=0.1)
    attachment = grass.attach(optimizer, model, update_interval=2)
    train(model, optimizer, batches(3))
    names, before = list(compact_layers(model)), copy.deepcopy(model.state_dict())
    del optimizer.param_groups[1]
    train(model, optimizer, batches(4))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"{name}.weight" for name in (names[0], names[2])}
    assert list(attachment.state_dict()) == names


def test_copies_are_attached_anew() -> None:
    model, optimizer, _ = attached(OPTIMIZERS["SGD"])
    model, optimizer = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match=r"SGD would train active rows that never reach .* call grass\.attach"):
        train(model, optimizer, batches(1))
    optimizer.zero_grad()
    grass.attach(optimizer, model)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, batches(1))
    assert not torch.equal(model.mix.weight, before["mix.weight"])


def test_a_second_attachment_resumes_from_before_its_first_step() -> None:
    """Its columns were drawn by its own seed, and a resumed run draws the same."""

    def begun(state: dict | None = None) -> tuple[Network, torch.optim.Optimizer, Attachment]:
        model = Network()
        grass.compact(model, rank=3, explore=3)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if state is None:
            attachment = grass.attach(optimizer, model, update_interval=2)
            train(model, optimizer, batches(3))
            attachment.close()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return model, optimizer, grass.attach(optimizer, model, update_interval=2, seed=7)

    model, optimizer, attachment = begun()
    state = copy.deepcopy({"model": model.state_dict(), "attachment": attachment.state_dict()})
    again, other, resumed = begun(state)
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["attachment"])
    for one, two in ((model, optimizer), (again, other)):
        train(one, two, batches(5))
    assert_same_weights(model, again)


def test_detach() -> None:
    """Afterwards the optimizer would no longer reach the weights, so it is refused; it may be attached anew."""
    model, optimizer, attachment = attached(OPTIMIZERS["AdamW"])
    train(model, optimizer, batches(1))
    attachment.close()
    with pytest.raises(RuntimeError, match=r"grass\.attach"):
        train(model, optimizer, batches(1))
    grass.attach(optimizer, model)
    train(model, optimizer, batches(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_policy": "bank"}, "state_policy='bank'.*'reset' or 'keep'"),
        ({"update_interval": 0}, "update_interval=0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"selection": "nonsense"}, "nonsense"),
        ({"refresh": "guess"}, "refresh='guess'"),
        ({"sketch_size": 0}, "sketch_size=0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_out_of_range(options: dict, message: str) -> None:
    model, _ = converted()
    optimizer = torch.optim.SGD([model.up.active], lr=0.1)
    with pytest.raises(ValueError, match=message):
        grass.attach(optimizer, model, **options)
    grass.attach(optimizer, model)


def test_what_cannot_be_attached() -> None:
    plain = Network()
    with pytest.raises(ValueError, match=r"SGD holds no active rows.*compact"):
        grass.attach(torch.optim.SGD(plain.parameters(), lr=0.1), plain)
    model, optimizer, _ = attached(OPTIMIZERS["SGD"])
    with pytest.raises(ValueError, match="already"):
        grass.attach(optimizer, model)
    with pytest.raises(ValueError, match="already"):
        grass.attach(grass.GrassAdamW(model), model)
    with pytest.raises(ValueError, match="does not take Rprop"):
        grass.attach(torch.optim.Rprop([model.up.active]), model)
    other, _ = converted()
    both = torch.optim.SGD([model.up.active, other.up.active], lr=0.1)
    with pytest.raises(ValueError, match="outside of the model"):
        grass.attach(both, model)
    grass.attach(both, nn.ModuleList([model, other]))


def test_two_optimizers_share_a_model() -> None:
    """Muon for the matrices, AdamW for the rest, as Muon is used."""
    model = Network()
    grass.compact(model, rank=3, explore=0)
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    muon, adamw = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)
    grass.attach(muon, model, update_interval=2)
    first, bias = selections(model), model.up.bias.detach().clone()
    for batch in batches(4):
        loss_of(model, batch).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert selections(model) != first
    assert not torch.equal(model.up.bias, bias)


@pytest.mark.parametrize("by_grass", [True, False], ids=["GrassAdamW", "AdamW"])
def test_an_older_attached_optimizer_is_refused(by_grass: bool) -> None:
    """Its step, that is, once a newer optimizer was built on the same columns. Closing it leaves them to the newer."""
    model, older, attachment = attached(OPTIMIZERS["Muon"])
    newer = grass.GrassAdamW(model) if by_grass else torch.optim.AdamW([p for p in model.parameters() if p.ndim == 2])
    if not by_grass:
        grass.attach(newer, model)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=f"belong to a {type(newer).__name__} that was built later"):
        older.step()
    attachment.close()
    assert all(layer.owner.optimizer is newer for layer in compact_layers(model).values())
    newer.step()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_maximize_ascends_in_all_rows(fused: bool, dim: int) -> None:
    """Maximizing the loss with its sign turned is minimizing the loss, explored rows included."""
    trained = []
    for sign in (1, -1):
        model = Network(torch.float64)
        grass.compact(model, rank=3, explore=3, dim=dim)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=fused, maximize=sign < 0)
        grass.attach(optimizer, model, update_interval=4)
        for batch in batches(10, dtype=torch.float64):
            optimizer.zero_grad()
            (sign * loss_of(model, batch)).backward()
            optimizer.step()
        trained.append(model)
    for name, layer in compact_layers(trained[0]).items():
        torch.testing.assert_close(trained[1].get_submodule(name).weight, layer.weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("selection", ["uniform", "top_r"])
@pytest.mark.parametrize("overflowing", [0, 3, 4, 7], ids=lambda step: f"in step {step}")
def test_fused_step_that_a_scaler_skips(overflowing: int, selection: str) -> None:
    """A fused optimizer skips an overflowing step inside ``step()``. All is as if the scaler had not called it."""
    trained = []
    for fused in (False, True):
        model = Network(torch.float64)
        grass.compact(model, rank=3, explore=3)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=fused)
        grass.attach(optimizer, model, update_interval=4, selection=selection)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step, batch in enumerate(batches(12, dtype=torch.float64)):
            optimizer.zero_grad()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            loss = loss_of(model, batch) * (torch.inf if step == overflowing else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert unchanged == (step == overflowing)
            if unchanged and not fused:  # nothing tells the attachment of a step() that was not called
                for layer in compact_layers(model).values():
                    layer.clear_sketch()
            assert scaler.get_scale() == (128.0 if step >= overflowing else 256.0)
        trained.append(model)
    assert selections(trained[1]) == selections(trained[0])
    for name, layer in compact_layers(trained[0]).items():
        torch.testing.assert_close(trained[1].get_submodule(name).weight, layer.weight, rtol=1e-9, atol=1e-12)


def test_handles_are_closed_by_one_word() -> None:
    """The earlier names still work."""
    for kind, earlier in ((grass.Attachment, "detach"), (grass.in_backward.InBackward, "remove")):
        assert getattr(kind, earlier) is kind.close
    assert callable(grass.Stream.close)
    assert callable(grass.diagnostics.SelectionHistory.close)


def test_rank_may_be_positional() -> None:
    named, positional = (torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2))
    grass.compact(named, rank=0.25)
    grass.compact(positional, 0.25)
    assert named[0].active.shape == positional[0].active.shape


def test_state_that_was_loaded_without_the_attachments(caplog: pytest.LogCaptureFixture) -> None:
    """As Trainer does, which saves the optimizer alone."""
    model, optimizer, attachment = attached(OPTIMIZERS["AdamW"])
    train(model, optimizer, batches(6))
    for loads in (True, False):
        caplog.clear()
        again, other, theirs = attached(OPTIMIZERS["AdamW"])
        again.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        if loads:
            theirs.load_state_dict(attachment.state_dict())
        train(again, other, batches(2))
        assert caplog.text.count("this attachment has not seen") == (not loads)
