"""Any torch optimizer over the active rows: ``grass.attach`` writes back and refreshes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import Attachment
from tests.compact_mode.networks import (
    DIMS,
    PLAYED,
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
from tests.reference import relative_difference, uneven_gradients

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


def adafactor_of_transformers(p: list[Tensor]) -> torch.optim.Optimizer:
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False, clip_threshold=1e9)


@pytest.mark.parametrize("explore", [0, 4, 12])
@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Adafactor(p, lr=1e-3), adafactor_of_transformers], ids=["torch", "transformers"]
)
def test_adafactor_s_new_rows_move_as_far_as_others(make: Make, dim: int, policy: str, explore: int) -> None:
    """Gradients of rows differ by 10^3, which its second moments take out: also of rows that were selected just now.

    With twelve explored rows the matrix of active rows is square. Factors of transformers' class are vectors.
    """
    scales = torch.tensor([10.0 ** (i % 4 - 2) for i in range(16)])
    layer = nn.Linear(16, 16, bias=False)
    grass.compact(layer, rank=4, explore=explore, dim=dim)
    optimizer = make([layer.active])
    grass.attach(optimizer, layer, update_interval=5, state_policy=policy)
    generator, moved = torch.Generator().manual_seed(0), []
    for _ in range(6):
        before, rows = layer.weight.detach().clone(), layer.selected.clone()
        optimizer.zero_grad()
        factors = scales if dim == 1 else scales.unsqueeze(1)
        gradient = factors * torch.randn(16, 16, generator=generator)
        layer(torch.eye(16)).backward(gradient.t())
        optimizer.step()
        moved.append((layer.weight.detach() - before).abs().mean(1 - dim)[rows])
    assert 0.2 < moved[-1].min() / moved[-1].max() < 1


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_momentum_across_refreshes(policy: str, dim: int) -> None:
    """SGD's momentum of rows chosen again is kept or zeroed; checked against a full-size buffer, in float64."""
    layer = nn.Linear(7, 6, bias=False, dtype=torch.float64)
    weight, buffer = layer.weight.detach().clone(), torch.zeros(6, 7, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=0, dim=dim)
    optimizer = torch.optim.SGD([layer.active], lr=0.1, momentum=0.9)
    grass.attach(optimizer, layer, update_interval=2, state_policy=policy, selection="playback")
    rows = [layer.selected.clone(), *(torch.tensor(r) for r in ([0, 1, 2], [1, 2, 5], [0, 3, 5], [0, 3, 5], [2, 3, 4]))]
    PLAYED.append(iter(rows[1:]))
    for step, gradient in enumerate(uneven_gradients((6, 7), 10)):
        chosen = rows[step // 2]
        if step % 2 == 0:
            kept = torch.isin(chosen, rows[step // 2 - 1]) if policy == "keep" and step else torch.zeros(3, dtype=bool)
            stays = torch.zeros(buffer.shape[dim], dtype=bool).index_fill(0, chosen[kept], True)
            buffer *= stays.unsqueeze(1 - dim)
        moved = torch.zeros(buffer.shape[dim], dtype=torch.float64).index_fill(0, chosen, 1.0).unsqueeze(1 - dim)
        buffer = 0.9 * buffer + gradient * moved
        weight = weight - 0.1 * buffer * moved
        optimizer.zero_grad()
        layer(torch.eye(7, dtype=torch.float64)).backward(gradient.t())
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), weight)
    PLAYED.pop()


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


@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("explore", [0, 2])
def test_adagrad_s_new_rows_begin_with_its_first_value(explore: int, policy: str, caplog) -> None:
    """Otherwise they would move by the whole learning rate, where others move a hundredth of it."""
    layer = nn.Linear(12, 8, bias=False, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=explore)
    optimizer = torch.optim.Adagrad([layer.active], lr=0.1, initial_accumulator_value=4.0)
    grass.attach(optimizer, layer, update_interval=1, state_policy=policy)
    for _ in range(4):
        before, selected = layer.weight.clone(), layer.selected.clone()
        layer.active.grad = torch.full_like(layer.active, 0.02)
        optimizer.step()
        moved = (before - layer.weight)[:, selected]
        torch.testing.assert_close(moved, torch.full_like(moved, 0.1 * 0.02 / 2), rtol=1e-3, atol=0)
    assert not caplog.records


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


class PagedAdamW8bit(torch.optim.SGD):
    """An optimizer that another library calls an AdamW; without gradients it takes no decay off active rows."""


@pytest.mark.parametrize(
    ("make", "strength"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2, decoupled_weight_decay=True), 0.02),
        (lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2), 0.0),
        (lambda p: PagedAdamW8bit(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.SGD([{"params": p, "weight_decouple": True}], lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: PagedAdamW8bit([{"params": p, "weight_decouple": False}], lr=0.1, weight_decay=0.2), 0.0),
    ],
    ids=["AdamW", "Adam", "Muon", "Adafactor", "SGD", "AdamW of another library", "by its group", "not by its group"],
)
def test_decoupled_decay_of_explored_rows(make: Make, strength: float) -> None:
    """As strong as for selected rows on average: a row is explored in ``q`` of ``n - r`` steps."""
    layer = nn.Linear(12, 8, bias=False, dtype=torch.float64)
    grass.compact(layer, rank=3, explore=4)
    optimizer = make([layer.active])
    grass.attach(optimizer, layer)
    before, explored = layer.weight.clone(), layer.explored.clone()
    layer.active.grad = torch.zeros_like(layer.active)
    optimizer.step()
    expected = before[:, explored] * (1 - strength * 9 / 4)
    torch.testing.assert_close(layer.weight[:, explored], expected)


SCALED: dict[str, Callable[[list[Tensor], float, float], torch.optim.Optimizer]] = {
    "AdamW": lambda p, lr, decay: torch.optim.AdamW(p, lr=lr, weight_decay=decay),
    "tensor": lambda p, lr, decay: torch.optim.AdamW(p, lr=torch.tensor(lr, dtype=torch.float64), weight_decay=decay),
    "decoupled": lambda p, lr, decay: torch.optim.NAdam(p, lr=lr, weight_decay=decay, decoupled_weight_decay=True),
    "SGD": lambda p, lr, decay: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Muon": lambda p, lr, decay: torch.optim.Muon(p, lr=lr, weight_decay=decay),
}


class Codes(torch.optim.SGD):
    """An optimizer whose state of a parameter is one byte for each element, as of 8-bit AdamW."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("state1", torch.zeros_like(p, dtype=torch.uint8))
        return super().step(closure)


def test_codes_of_moments_are_refused_in_the_first_step() -> None:
    """Blocks of rows share a scale: exchanged and zeroed codes would stand for other moments."""
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3)
    optimizer = Codes([layer.active], lr=0.1)
    grass.attach(optimizer, layer)
    layer.active.grad = torch.ones_like(layer.active)
    with pytest.raises(ValueError, match=r"Codes holds 'state1' of active rows as Tensor of torch.uint8"):
        optimizer.step()


@pytest.mark.slow
def test_states_of_tensor_subclasses_are_refused_in_the_first_step() -> None:
    torchao = pytest.importorskip("torchao.optim")
    layer = nn.Linear(256, 256, bias=False)
    grass.compact(layer, rank=0.25)
    optimizer = torchao.AdamW8bit([layer.active])
    grass.attach(optimizer, layer)
    layer.active.grad = torch.ones_like(layer.active)
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="as OptimState8bit of"):
        optimizer.step()


class Remembering(torch.optim.SGD):
    """An optimizer that remembers something of each parameter from before its first step."""

    def __init__(self, params: list[Tensor], remember: Callable[[Tensor], object]) -> None:
        self.remember = remember
        super().__init__(params, lr=1e-3, momentum=0.9)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("memory", self.remember(p.detach()))
        return super().step(closure)


@pytest.mark.parametrize(
    ("remember", "message"),
    [
        (lambda p: p.clone(), "a copy of active rows"),  # the x0 of MADGRAD, the z of Schedule-Free
        (lambda p: p.flatten()[::11].clone(), "a copy of active rows"),  # Prodigy's slices
        (lambda p: p.flatten().clone(), "a copy of active rows"),  # of one element each, its default
        (lambda p: torch.zeros(2, *p.shape), "with more than an entry for each active row"),  # AdEMAMix's
        (lambda p: {0.9: torch.zeros_like(p)}, "with more than an entry for each active row"),  # AggMo's
        (lambda p: deque([torch.zeros_like(p)]), "with more than an entry for each active row"),  # AdaShift's
        (lambda p: SimpleNamespace(matrix=torch.zeros(32, 4)), "with more than an entry"),  # GaLore's projector
        (lambda p: p.T @ p, "a matrix over active rows"),  # Shampoo's
        (lambda p: [p @ p.T, p.T @ p], "a matrix over active rows"),  # SOAP's
        (lambda p: torch.zeros_like(p), None),
        (lambda p: [p @ p.T], None),  # of the other dimension
        (lambda p: p.mean(), None),
    ],
)
def test_state_that_other_rows_cannot_take_over(remember: Callable[[Tensor], object], message: str | None) -> None:
    layer = nn.Linear(64, 24, bias=False)
    grass.compact(layer, rank=16)
    optimizer = Remembering([layer.active], remember)
    grass.attach(optimizer, layer)
    layer.active.grad = torch.randn_like(layer.active)
    if message is None:
        optimizer.step()
        return
    with pytest.raises(ValueError, match=f"Remembering holds 'memory', {message}"):
        optimizer.step()


class OwnAdafactor(torch.optim.Adafactor):
    """A loop's own class of Adafactor."""


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, OwnAdafactor])
@pytest.mark.parametrize("keyword", [False, True])
def test_adafactor_steps_by_a_closure_as_without(kind: type[torch.optim.Adafactor], keyword: bool) -> None:
    """Lightning steps so: the gradient of new columns exists within the step only."""
    inputs = 10.0 ** torch.arange(-5, 7)

    def trained(closes: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(12, 8, bias=False)
        grass.compact(layer, rank=3, explore=0)
        optimizer = kind([layer.active], lr=0.1)
        grass.attach(optimizer, layer, update_interval=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = layer(inputs).square().sum()
            loss.backward()
            return loss

        for _ in range(6):
            if closes:
                assert (optimizer.step(closure=closure) if keyword else optimizer.step(closure)) is not None
            else:
                closure()
                optimizer.step()
        return layer.weight

    assert torch.equal(trained(True), trained(False))


def test_scale_without_a_learning_rate() -> None:
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3)
    optimizer = torch.optim.SGD([layer.active], lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor has by default
    grass.attach(optimizer, layer, scale="auto")
    layer.active.grad = torch.ones_like(layer.active)
    with pytest.raises(ValueError, match="Invalid scale='auto': a group of SGD has lr=None"):
        optimizer.step()


def test_lbfgs_takes_no_explored_rows() -> None:
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3, dim=0)
    with pytest.raises(ValueError, match="convert with dim=0, and with explore=0"):
        grass.attach(torch.optim.LBFGS([layer.active]), layer)


def test_momentum_is_no_copy_where_the_gradient_is_the_weight() -> None:
    """As with a loss of half the squared norm."""
    layer = nn.Linear(64, 24, bias=False)
    grass.compact(layer, rank=16)
    optimizer = torch.optim.SGD([layer.active], lr=0.1, momentum=0.9)
    grass.attach(optimizer, layer)
    layer.active.grad = layer.active.detach().clone()
    optimizer.step()
    assert optimizer.state[layer.active]["momentum_buffer"].any()


def test_scale_passes_over_the_frozen_weights_of_converted_layers() -> None:
    """As in ``AdamW(model.parameters())``: with the active rows alone in their group it is the same."""
    weights = []
    for every in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(12, 8, bias=False)
        grass.compact(layer, rank=3, explore=3)
        optimizer = torch.optim.AdamW(layer.parameters() if every else [layer.active])
        grass.attach(optimizer, layer, scale="auto")
        layer.active.grad = torch.ones_like(layer.active)
        optimizer.step()
        weights.append(layer.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("scale", ["auto", 2.0])
@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("explore", [0.25, 0])
def test_scale_is_a_larger_rate_with_the_same_decay(explore: float, make: Callable, scale: float | str) -> None:
    """Under a schedule, which sees the rate that was given."""
    times = 1.0 if scale == "auto" and not explore else 2.0  # n / (r + q)
    weights = []
    for lr, decay, options in ((0.04, 0.1, {"scale": scale}), (0.04 * times, 0.1 / times, {})):
        model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8)).double()
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        grass.compact(model, rank=0.25, explore=explore, targets="all-linear")
        optimizer = make([layer.active for layer in compact_layers(model).values()], lr, decay)
        grass.attach(optimizer, model, update_interval=2, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(5):
            model(torch.randn(4, 16, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(lr * 0.9 ** (number + 1))
            assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay if make is not SCALED["SGD"] else 0)
        weights.append([layer.matrix().clone() for layer in compact_layers(model).values()])
    for ours, expected in zip(*weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)  # float64: one rounding of the rate


def test_scale_says_what_it_is_and_which_groups_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8))
    grass.compact(model, rank=4, explore=4, targets="all-linear")
    both = [model[0].active, model[1].active]
    for held, scale in ((both, "auto"), ([*both, model[0].bias], 2.0)):
        with pytest.raises(ValueError, match=r"scale=.*multiplied by .* make a group of each"):
            grass.attach(torch.optim.SGD(held, lr=0.1), model, scale=scale)
    apart = torch.optim.SGD([{"params": [each]} for each in (*both, model[0].bias)], lr=0.1)
    with caplog.at_level("INFO", logger="grass"):
        grass.attach(apart, model, scale="auto")
    assert "projected weights: lr x 1.5 to 2 (scale='auto')" in caplog.text


def test_groups_may_share_a_rate_that_is_a_tensor() -> None:
    """As torch makes them of ``lr=torch.tensor(...)``; the user's tensor stays as it is."""
    moved = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
        model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8)).double()
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        grass.compact(model, rank=2, explore=2, targets="all-linear")  # factors 4 and 3
        optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters() if p.requires_grad], lr=lr)
        grass.attach(optimizer, model, scale="auto")
        model(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
        optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
        assert [float(group["lr"]) for group in optimizer.param_groups] == [1e-2] * 4
        assert float(lr) == 1e-2
    for ours, expected in zip(*moved, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)  # float64: one rounding of the rate


def test_hooks_of_the_step_see_and_set_rates(caplog: pytest.LogCaptureFixture) -> None:
    """Post-hooks from before see the user's rate and may change it. A pre-hook's rate stays, and a warning says so."""
    model = nn.Sequential(nn.Linear(16, 12, bias=False))
    grass.compact(model, rank=4, explore=4, targets="all-linear")
    optimizer = torch.optim.SGD([model[0].active], lr=0.08)
    (group,), seen = optimizer.param_groups, []

    def halve(*_: object) -> None:
        seen.append(group["lr"])
        group["lr"] /= 2

    hook = optimizer.register_step_post_hook(halve)
    grass.attach(optimizer, model, scale="auto")
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    assert (seen, group["lr"]) == ([0.08, 0.04, 0.02], 0.01)
    hook.remove()
    assert not caplog.records
    optimizer.register_step_pre_hook(lambda *_: group.update(lr=0.5))
    for _ in range(2):
        optimizer.step()
        assert group["lr"] == 0.5
    (record,) = caplog.records
    assert "a hook of step() sets 'lr' of active rows" in record.message


def test_a_step_that_raises_leaves_the_rate() -> None:
    model, optimizer, attachment = attached(lambda p: torch.optim.SGD([t for t in p if t.ndim == 2], lr=0.1), scale=3.0)
    train(model, optimizer, batches(1))

    def broken() -> Tensor:
        raise KeyError("data")

    for _ in range(2):
        with pytest.raises(KeyError):
            optimizer.step(broken)
    train(model, optimizer, batches(1))
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(KeyError):
        optimizer.step(broken)
    attachment.close()
    assert optimizer.param_groups[0]["lr"] == 0.1


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


@pytest.mark.parametrize(
    ("make", "explore", "warns"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), None, True),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), 0, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), None, False),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), None, False),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), None, False),
    ],
)
def test_decay_in_the_gradient_does_not_reach_explored_rows(
    make: Make, explore: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Network()
    grass.compact(model, rank=3, explore=explore)
    grass.attach(make([p for p in model.parameters() if p.requires_grad]), model)
    assert ("does not reach explored columns" in caplog.text) == warns
