"""Mistakes that would train nothing, or something else than the model, say so before anything has changed."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from grass.selection.rules import Selection, register_rule
from tests.compact_mode.networks import (
    Network,
    assert_same_weights,
    batches,
    compact_layers,
    converted,
    loss_of,
    selections,
    train,
)

OPTIMIZERS = {
    "GrassAdamW": lambda model: GrassAdamW(model.parameters(), rank=3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD, some": lambda model: torch.optim.SGD([model.mix.weight, model.up.bias], lr=0.1),
    "AdamW, trainable": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
}


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, message: str) -> None:
    """The step raises and leaves weights, active rows and the optimizer's state as they were."""
    loss_of(model, batches(1)[0]).backward()
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same_weights(model, before)
    assert not optimizer.state


def test_no_conversion() -> None:
    with pytest.raises(ValueError, match=r"Network has no active rows.*grass.compact.*grass.param_groups"):
        GrassAdamW(Network())
    model = Network()
    grass.compact(model, rank=3, explore=0)
    grass.expand(model)
    with pytest.raises(ValueError, match="no active rows"):
        GrassAdamW(model)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_conversion_after_the_optimizer_was_built(make) -> None:
    model = Network()
    optimizer = make(model)
    grass.compact(model, rank=3, explore=0)
    refused(model, optimizer, r"built before grass.compact\(\)")
    grass.expand(model)
    train(model, optimizer, batches(1))


def test_groups_by_the_ending_of_names() -> None:
    """Active rows of one layer alone, and the frozen weight of another."""
    model = Network()
    grass.compact(model, rank=3, explore=0)
    chosen = [p for name, p in model.named_parameters() if name in ("up.active", "mix.weight")]
    refused(model, GrassAdamW(chosen), r"frozen weight of 'mix'.*requires_grad")


def test_a_weight_that_was_tied_after_the_conversion() -> None:
    """The embedding would be frozen, and of the tied weight only some columns would move."""
    model = nn.ModuleDict({"embed": nn.Embedding(30, 8), "project": nn.Linear(8, 30)})
    grass.compact(model, rank=2)
    model.project.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"'project' is also 'embed.weight': tie weights before grass.compact"):
        GrassAdamW(model)
    two = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    grass.compact(two, rank=2)
    two.b.weight = two.a.weight
    with pytest.raises(ValueError, match="is also"):
        GrassAdamW(two)


def test_another_dtype_of_a_converted_model() -> None:
    model = Network(torch.bfloat16)
    grass.compact(model, rank=3)
    grass.compact(model, rank=3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16.*not .*dtype=torch.float32.*expand"):
        grass.compact(model, rank=3, dtype=torch.float32)


@pytest.mark.parametrize("kind", [GrassAdamW, torch.optim.AdamW])
def test_weight_decay_that_no_active_rows_have(kind, caplog: pytest.LogCaptureFixture) -> None:
    model = Network()
    grass.compact(model, rank=3)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def warnings(decaying: list[str]) -> list[str]:
        caplog.clear()
        groups = [
            {"params": [p for name, p in trained if (name in decaying) == decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ]
        optimizer = kind([group for group in groups if group["params"]])
        if kind is torch.optim.AdamW:
            grass.attach(optimizer, model)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    names = [name for name, _ in trained]
    (message,) = warnings([name for name in names if name.endswith("weight")])
    assert "weight_decay=0.1 is for none of the active rows" in message
    assert not warnings([name for name in names if name.endswith("active")])
    assert not warnings(["up.active"])
    assert not warnings([])


def test_part_of_the_model_converted_after_the_optimizer_was_built() -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0, targets=["up"])
    optimizer = GrassAdamW(model)
    grass.compact(model, rank=3, explore=0)
    refused(model, optimizer, "built before")


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda model: torch.optim.SGD([model.up.active], lr=0.1),
        lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True),
    ],
    ids=["AdamW", "SGD, some", "fused"],
)
def test_foreign_optimizer(make) -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0)
    optimizer = make(model)
    refused(model, optimizer, r"never reach the model's weights.*grass.attach")
    grass.attach(optimizer, model)
    train(model, optimizer, batches(1))


class Container(torch.optim.Optimizer):
    """Wraps optimizers as torchtitan's ``OptimizersContainer`` does: their parameters, and a list of them."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("kind", ["GrassAdamW", "attached", "nested"])
def test_optimizers_that_wrap_ours(kind: str) -> None:
    trained = []
    for wraps in (False, True):
        model = Network()
        grass.compact(model, rank=3, seed=1)
        if kind == "attached":
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            grass.attach(optimizer, model, update_interval=2)
        else:
            optimizer = GrassAdamW(model, update_interval=2)
        if wraps:
            optimizer = Container(Container(optimizer)) if kind == "nested" else Container(optimizer)
        train(model, optimizer, batches(5))
        trained.append(model)
    assert_same_weights(*trained)


def test_a_foreign_optimizer_beside_ours() -> None:
    """That ours is alive does not help: nothing steps it."""
    model = Network()
    grass.compact(model, rank=3, explore=0)
    ours = GrassAdamW(model)
    refused(model, torch.optim.AdamW(model.parameters()), r"never reach the model's weights")
    train(model, ours, batches(1))


def test_behind_a_scheduler_and_a_scaler() -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused(model, optimizer, "grass.attach")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(RuntimeError, match=r"grass.attach"):
        scaler.step(optimizer)


def test_others_are_left_in_peace() -> None:
    """Optimizers of other models, or of this model's plain parameters."""
    model, optimizer = converted()
    bystander, biases = Network(), torch.optim.SGD([model.up.bias, model.norm.weight], lr=0.1)
    train(bystander, torch.optim.AdamW(bystander.parameters()), batches(1))
    train(model, biases, batches(1))
    train(model, optimizer, batches(1))
    expanded = copy.deepcopy(model)
    grass.expand(expanded)
    train(expanded, torch.optim.AdamW(expanded.parameters()), batches(1))
    del model, optimizer, biases
    gc.collect()
    train(bystander, torch.optim.AdamW(bystander.parameters()), batches(1))


@pytest.mark.parametrize(
    "parameters",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [p for p in model.parameters() if p.requires_grad],
        lambda model: [{"params": list(m.parameters()), "lr": 1e-2} for m in model.children()],
    ],
    ids=["model", "parameters", "named", "trainable", "groups"],
)
def test_all_ways_to_name_the_parameters(parameters) -> None:
    """All of them train the same model in the same way; the frozen weights may be among them."""
    models = []
    for make in (parameters, lambda model: model):
        model = Network()
        grass.compact(model, rank=3, explore=0)
        optimizer = GrassAdamW(make(model), **{**grass.PAPER, "lr": 1e-2, "update_interval": 2, "refresh": "exact"})
        train(model, optimizer, batches(5))
        models.append(model)
    assert_same_weights(*models)


def test_replacement() -> None:
    """Active rows are neither scaled nor repeated."""
    model = Network()
    grass.compact(model, rank=3, explore=0)
    with pytest.raises(ValueError, match="replacement=False"):
        GrassAdamW(model, selection="uniform", replacement=True)
    optimizer = GrassAdamW([model.up.bias])
    with pytest.raises(ValueError, match="replacement=False"):
        optimizer.add_param_group({"params": [model.up.active], "selection": "uniform", "replacement": True})
    assert len(optimizer.param_groups) == 1
    GrassAdamW(
        [{"params": [model.up.active]}, {"params": [model.up.bias], "replacement": True, "selection": "uniform"}]
    )


def test_another_dim_than_the_layers_have() -> None:
    model = Network()
    grass.compact(model, rank=3)
    with pytest.raises(ValueError, match="dim=0: 'up' was converted with dim=1"):
        GrassAdamW(model, dim=0)


@pytest.mark.parametrize(
    ("weights", "rows"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_active_rows_of_a_precision_that_does_not_fit_the_weights(weights: torch.dtype, rows: torch.dtype) -> None:
    model = Network(weights)
    with pytest.raises(ValueError, match=rf"Invalid dtype={rows}: must be torch.float32, or None .*{weights}"):
        grass.compact(model, rank=3, dtype=rows)
    assert not compact_layers(model)


def test_weight_norm_after_the_conversion() -> None:
    model = Network()
    grass.compact(model, rank=3)
    nn.utils.parametrizations.weight_norm(model.mix)
    with pytest.raises(RuntimeError, match="'mix' is no longer its parameter: apply weight_norm, pruning and other"):
        GrassAdamW(model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_gradient_hooks_stays_at_full_rank(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, calls = Network(), []
    getattr(model.mix.weight, kind)(calls.append)
    grass.compact(model, rank=3)
    assert [*compact_layers(model)] == ["up", "down"]
    assert "passes over 'mix': its weight has gradient hooks" in caplog.text
    train(model, GrassAdamW(model), batches(1))
    assert len(calls) == 1


@pytest.mark.parametrize("rank", [2, 8, 0.9])
def test_another_rank_than_the_layers_have(rank) -> None:
    model = Network()
    grass.compact(model, rank=3, explore=0, dim=0)
    with pytest.raises(ValueError, match=rf"rank={rank}: must be None or 3"):
        GrassAdamW(model, rank=rank)
    with pytest.raises(ValueError, match=r"explore=1.0: must be None or 0.*grass.compact\(\)"):
        GrassAdamW(model, explore=1.0)
    train(model, GrassAdamW([model.up.active, model.down.active], rank=3), batches(1))


register_rule("scaled", lambda norms, rank, generator, replacement: Selection(torch.arange(rank), torch.ones(rank)))


def test_a_rule_that_scales_rows() -> None:
    model, optimizer = converted(selection="scaled", update_interval=2)
    with pytest.raises(ValueError, match="selection='scaled'"):
        train(model, optimizer, batches(2))


def test_state_of_another_number_of_explored_rows() -> None:
    model, optimizer = converted(explore=2)
    train(model, optimizer, batches(1))
    other, other_optimizer = converted()
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match=r"explore=2 for 'up' with explore=0"):
        other_optimizer.load_state_dict(optimizer.state_dict())
    assert_same_weights(other, before)


@pytest.mark.parametrize("swapped", [False, True])
def test_arguments_of_another_kind(swapped: bool) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match="takes an optimizer and a model, got"):
        grass.attach(*((model, optimizer) if swapped else (optimizer, optimizer)))
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got generator"):
        grass.compact(model.parameters(), rank=3)


def test_state_of_another_rank() -> None:
    model, optimizer = converted()
    train(model, optimizer, batches(2))
    other, other_optimizer = converted(rank=2)
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match=r"rank=3, dim=1 for 'up' with rank=2"):
        other_optimizer.load_state_dict(optimizer.state_dict())
    assert_same_weights(other, before)
    assert not other_optimizer.state


def test_a_layer_cannot_be_left_half_selected() -> None:
    layer = nn.Linear(4, 4)
    grass.compact(layer, rank=2, explore=0)
    before = copy.deepcopy(layer)
    with pytest.raises((RuntimeError, IndexError)):
        layer.select(torch.tensor([1, 9]))
    assert selections(layer) == selections(before)
    assert torch.equal(layer.active, before.active)
    assert compact_layers(layer)


@pytest.mark.parametrize("through", ["GrassAdamW", "attach"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_second_optimizer_with_the_same_seed_draws_again(
    through: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As a loop with a new optimizer for each epoch: it would never reach the other columns."""
    model, first = converted()
    train(model, first, batches(2))
    caplog.clear()
    if through == "attach":
        second = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        grass.attach(second, model, seed=seed)
    else:
        second = GrassAdamW(model, seed=seed)
    train(model, second, batches(2))
    said = [record.getMessage() for record in caplog.records if "draws the same columns again" in record.getMessage()]
    assert len(said) == (seed == 0)


def test_going_on_with_an_optimizer_draws_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    """Loaded into a new one, in a copy, and back to before its first step."""
    model, first = converted()
    begin = copy.deepcopy((model.state_dict(), first.state_dict()))
    train(model, first, batches(2))
    second = GrassAdamW(model)
    second.load_state_dict(first.state_dict())
    train(model, second, batches(2))
    train(*copy.deepcopy((model, second)), batches(2))
    model.load_state_dict(begin[0])
    second.load_state_dict(begin[1])
    train(model, second, batches(2))
    assert "again" not in caplog.text


def test_active_rows_without_their_weight_are_not_loaded() -> None:
    model, optimizer = converted()
    train(model, optimizer, batches(2))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"active comes without .*weight: which columns they are is not saved"):
        model.load_state_dict(trained, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "weight" in name)


def test_values_that_forward_would_not_read() -> None:
    """Fast weights in the place of active rows are refused; those of all parameters are not, which have the weight."""
    model, _ = converted(explore=0)
    x = batches(1)[0][0]
    fast = {name: p - 0.1 for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(TypeError, match=r"in the place of 'up.active', as by functional_call.*grass.expand"):
        torch.func.functional_call(model, fast, (x,))
    with torch.no_grad():
        whole = {name: p.detach() for name, p in model.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, whole, (x,)), model(x))


def test_weights_without_a_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'1.weight' has no shape yet: run one forward"):
        grass.compact(model, rank=2, targets="all-linear")
    model(torch.randn(2, 4))
    assert grass.compact(model, rank=2, targets="all-linear") == ["0", "1"]
