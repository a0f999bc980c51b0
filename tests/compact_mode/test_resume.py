"""Save, stop, resume: bit-identical to never having stopped, the next refresh included."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import (
    DIMS,
    POLICIES,
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
from tests.reference import assert_same_state

INTERVAL = 4
OPTIONS = dict(update_interval=INTERVAL, selection="multinomial_norm", warmup_after_refresh=3, weight_decay=0.1)
PRECISIONS = [
    pytest.param((torch.float32, None), id="fp32"),
    pytest.param((torch.bfloat16, None), id="bf16"),
    pytest.param((torch.bfloat16, torch.float32), id="fp32 over bf16"),
]
STOPS = [
    pytest.param(2, id="within an interval"),
    pytest.param(INTERVAL - 1, id="before the step that gathers the sketch"),
    pytest.param(INTERVAL, id="after a refresh"),
    pytest.param(2 * INTERVAL - 1, id="before the second such step"),
]
Resume = Callable[[Network, GrassAdamW, Network, GrassAdamW], None]


def model_first(saved: Network, state: GrassAdamW, model: Network, optimizer: GrassAdamW) -> None:
    model.load_state_dict(through_file(saved.state_dict()))
    optimizer.load_state_dict(through_file(state.state_dict()))


def optimizer_first(saved: Network, state: GrassAdamW, model: Network, optimizer: GrassAdamW) -> None:
    optimizer.load_state_dict(through_file(state.state_dict()))
    model.load_state_dict(through_file(saved.state_dict()))


def assert_goes_on_alike(ours: tuple[Network, GrassAdamW], theirs: tuple[Network, GrassAdamW], data: list) -> None:
    """Equal now, equal after more steps that refresh the rows."""
    assert_same_weights(theirs[0], ours[0])
    assert_same_state(theirs[1].state_dict(), ours[1].state_dict())
    before = selections(ours[0])
    assert train(*ours, data) == train(*theirs, data)
    assert selections(ours[0]) != before
    assert_same_weights(theirs[0], ours[0])
    assert_same_state(theirs[1].state_dict(), ours[1].state_dict())


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("load", [model_first, optimizer_first])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_through_torch_save(policy: str, dim: int, precision: tuple, load: Resume, stop: int) -> None:
    """The new process converts with another seed: its own first selection must not matter."""
    dtype, active = precision
    options = dict(OPTIONS, dim=dim, active=active, state_policy=policy)
    model, optimizer = converted(dtype, **options)
    data = batches(stop + 2 * INTERVAL + 1, dtype=dtype)
    train(model, optimizer, data[:stop])
    other, other_optimizer = converted(dtype, seed=9, **options)
    load(model, optimizer, other, other_optimizer)
    assert_goes_on_alike((model, optimizer), (other, other_optimizer), data[stop:])


def test_the_fine_part_is_in_the_optimizers_state() -> None:
    """The test above can fail: rows of fp32 hold more than the bf16 weight that the model's state has."""
    model, optimizer = converted(torch.bfloat16, active=torch.float32)
    train(model, optimizer, batches(2, dtype=torch.bfloat16))
    for layer in compact_layers(model).values():
        assert not torch.equal(layer.active.bfloat16().float(), layer.active)
        assert optimizer.state[layer.active]["active"].numel() == 0, "a second copy in memory would be a waste"
    saved = optimizer.state_dict()["state"]
    assert sum("active" in state for state in saved.values()) == 3
    model, optimizer = converted()
    train(model, optimizer, batches(2))
    assert not any("active" in state for state in optimizer.state_dict()["state"].values())


def test_loading_into_itself_and_going_back() -> None:
    """A rollback to an earlier selection, in the same process."""
    model, optimizer = converted(**OPTIONS)
    data = batches(12)
    train(model, optimizer, data[:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, data[3:9])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_goes_on_alike((model, optimizer), (other, other_optimizer), data[3:])


@pytest.mark.parametrize("explore", [0, 2])
@pytest.mark.parametrize("calibrated", [False, True])
def test_going_back_to_before_the_first_step(calibrated: bool, explore: int) -> None:
    """As a search for the learning rate does, in the same process."""
    model, data = Network(), batches(12)
    calibration = (lambda model: loss_of(model, data[0])) if calibrated else None
    grass.compact(model, rank=3, explore=explore, calibration=calibration)
    optimizer = GrassAdamW(model, **OPTIONS)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, data[:9])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_goes_on_alike((model, optimizer), (other, other_optimizer), data)


def in_phases(model: nn.Module, through: str, seed: int) -> tuple[nn.Module, Any]:
    """A new optimizer of a converted model, which begins a phase, and what to save beside the model."""
    options: dict[str, Any] = {"update_interval": 50, "seed": seed}
    if through == "GrassAdamW":
        optimizer: Any = GrassAdamW(model, lr=1e-2, **options)
        return optimizer, optimizer
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return optimizer, grass.attach(optimizer, model, **options)


def test_groups_that_are_put_into_the_list_before_loading() -> None:
    """As by Lightning's ``BaseFinetuning``, where a run resumes that has unfrozen layers by ``add_param_group``."""

    def of_bias(model: Network) -> GrassAdamW:
        return GrassAdamW([model.up.bias], update_interval=2)

    def columns(model: Network) -> list[nn.Parameter]:
        return [layer.active for layer in compact_layers(model).values()]

    models = [Network(), Network()]
    for model in models:
        grass.compact(model, rank=3)
    saved, other = map(of_bias, models)
    saved.add_param_group({"params": columns(models[0]), "lr": 5e-3})
    train(models[0], saved, batches(5))
    models[1].load_state_dict(models[0].state_dict())
    params = [[models[1].up.bias], columns(models[1])]
    groups = zip(saved.param_groups, params, strict=True)
    other.param_groups = [{**group, "params": held} for group, held in groups]
    other.load_state_dict(through_file(saved.state_dict()))
    for model, optimizer in zip(models, (saved, other), strict=True):
        train(model, optimizer, batches(5))
    assert_same_weights(*models)
    assert selections(models[0]) == selections(models[1])


def test_a_state_without_steps_is_none_after_loading() -> None:
    """accelerate loads an optimizer's own state, and then gives it other parameters."""
    model = Network()
    grass.compact(model, rank=3)
    optimizer = grass.GrassAdamW(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("through", ["GrassAdamW", "attach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seeds", [(0, 1, 2), (0, 0, 0)], ids=["other seeds", "one seed"])
def test_a_phase_that_was_saved_before_its_first_step(seeds: tuple, dtype: torch.dtype, through: str) -> None:
    """An earlier optimizer, or another seed, has given layers other columns than a conversion does."""
    active = torch.float32 if dtype == torch.bfloat16 else None
    made: list[Any] = []
    for stops in (False, True):
        model = Network(dtype)
        grass.compact(model, rank=3, explore=2, dtype=active)
        for phase, seed in enumerate(seeds):
            optimizer, state = in_phases(model, through, seed)
            if stops and phase:
                saved = through_file([model.state_dict(), state.state_dict()])
                model = Network(dtype)
                grass.compact(model, rank=3, explore=2, dtype=active, seed=5)
                optimizer, state = in_phases(model, through, seed)
                model.load_state_dict(saved[0])
                state.load_state_dict(saved[1])
            train(model, optimizer, batches(5, dtype=dtype, seed=phase))
        made.append(model)
    assert_same_weights(*made)


def test_a_layer_that_is_frozen_for_a_phase() -> None:
    """It has no state when the phase is saved, and trains the rows that it had."""
    made: list[Any] = []
    for stops in (False, True):
        model, optimizer = converted(seed=1, explore=2)
        train(model, optimizer, batches(6))
        optimizer = GrassAdamW(model, lr=1e-2, seed=3)
        model.mix.active.requires_grad_(False)
        train(model, optimizer, batches(3))
        if stops:
            saved = through_file([model.state_dict(), optimizer.state_dict()])
            model, _ = converted(seed=2, explore=2)
            optimizer = GrassAdamW(model, lr=1e-2, seed=3)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        model.mix.active.requires_grad_(True)
        train(model, optimizer, batches(3))
        made.append(model)
    assert_same_weights(*made)


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"weights": "int8", "dim": 0}, {}])
def test_a_model_that_was_saved_before_any_step(options: dict[str, Any]) -> None:
    """Codes hold neither selected nor explored columns as the conversion left them."""
    made: list[Any] = []
    for stops in (False, True):
        model = Network()
        grass.compact(model, rank=3, explore=2, **options)
        optimizer = GrassAdamW(model, lr=1e-2)
        if stops:
            saved = through_file([model.state_dict(), optimizer.state_dict()])
            model = Network()
            grass.compact(model, rank=3, explore=2, seed=5, **options)
            optimizer = GrassAdamW(model, lr=1e-2)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, batches(3))
        made.append(model)
    assert_same_weights(*made)


def test_a_copy_without_its_model_is_not_saved() -> None:
    model, optimizer = converted(torch.bfloat16, active=torch.float32)
    train(model, optimizer, batches(1, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="copied without its model"):
        copy.deepcopy(optimizer).state_dict()


@pytest.mark.filterwarnings("ignore")
def test_flat_states_of_an_offloaded_optimizer() -> None:
    """Torch makes the state to be filled by a step, and reads its keys right after."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = converted(offload="cpu")
    train(model, optimizer, batches(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
    for _ in range(5):
        other, other_optimizer = converted(offload="cpu", seed=2)
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, other_optimizer, saved, options=flat)
        assert_same_state(other_optimizer.state_dict(), optimizer.state_dict())


def test_rows_of_another_conversion_are_refused() -> None:
    with pytest.raises(ValueError, match="explore=2 for 'up' with explore=3"):
        converted(explore=3)[1].load_state_dict(converted(explore=2)[1].state_dict())
    saved = converted(explore=2)[1].state_dict()
    with pytest.raises(ValueError, match="rank=3, dim=1 for 'up' with rank=4, dim=1: convert"):
        converted(rank=4, explore=1)[1].load_state_dict(saved)


def test_dense_mode_refuses_layers_that_wait() -> None:
    model, optimizer = converted()
    model.mix.active.requires_grad_(False)
    train(model, optimizer, batches(1))
    dense = GrassAdamW([{"params": list(Network().parameters()), "rank": 3}])
    with pytest.raises(ValueError, match="does not carry over between AdamW, dense and compact mode"):
        dense.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("back_to", [1, INTERVAL - 1])
def test_going_back_amid_a_gathered_sketch(back_to: int) -> None:
    """What the abandoned backward has gathered is forgotten."""
    model, optimizer = converted(**OPTIONS)
    data = batches(14)
    train(model, optimizer, data[:back_to])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, data[back_to : INTERVAL - 1])
    loss_of(model, (1e3 * data[-1][0].flip(1), data[-1][1])).backward()
    assert all(layer.sketch.grad.any() for layer in compact_layers(model).values())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_goes_on_alike((model, optimizer), (other, other_optimizer), data[back_to:])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copies_of_model_and_optimizer_together(through: Callable, stop: int) -> None:
    model, optimizer = converted(**OPTIONS, state_policy="bank")
    data = batches(stop + 2 * INTERVAL + 1)
    train(model, optimizer, data[:stop])
    assert_goes_on_alike((model, optimizer), through((model, optimizer)), data[stop:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", STOPS[1:3])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_through_distributed_checkpoint(tmp_path, policy: str, precision: tuple, flat: bool, stop: int) -> None:
    """Keyed by names; a fresh optimizer builds its state by a fake step, and is then loaded in place."""
    dtype, active = precision
    options = dict(OPTIONS, active=active, state_policy=policy)
    settings = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)

    def states(model: Network, optimizer: GrassAdamW) -> dict:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=settings)
        return {"model": get_model_state_dict(model), "optimizer": optimizer_state}

    model, optimizer = converted(dtype, **options)
    data = batches(stop + 2 * INTERVAL + 1, dtype=dtype)
    train(model, optimizer, data[:stop])
    saved = states(model, optimizer)
    assert list(saved["model"]) == list(Network().state_dict())
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    other, other_optimizer = converted(dtype, seed=9, **options)
    loaded = states(other, other_optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"], options=settings)
    assert_goes_on_alike((model, optimizer), (other, other_optimizer), data[stop:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fake_step_changes_nothing(policy: str) -> None:
    """What distributed checkpoint does to a fresh optimizer leaves training as it would have been."""
    options = dict(OPTIONS, state_policy=policy)
    model, optimizer = converted(**options)
    other, other_optimizer = converted(**options)
    get_optimizer_state_dict(other, other_optimizer)
    states = [other_optimizer.state[layer.active] for layer in compact_layers(other).values()]
    assert [(state["step"], state["refreshes"]) for state in states] == [(0, 1)] * 3
    plain = [p for name, p in other.named_parameters() if p.requires_grad and not name.endswith("active")]
    for p in plain:
        other_optimizer.state.pop(p)  # torch's own AdamW does count the fake step
    assert_same_weights(other, model)
    data = batches(2 * INTERVAL + 1)
    assert train(model, optimizer, data) == train(other, other_optimizer, data)
    assert_same_weights(other, model)
