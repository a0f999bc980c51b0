"""``grass.step_in_backward`` trains as the ordinary loop does, to the bit, and holds one gradient at a time.

All tests share the loop and the reference below, which is why the file has more than 300 lines.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import grass
from grass import PAPER, GrassAdamW, step_in_backward
from tests.distributed.world import run_world

WORDS, WIDTH, INTERVAL, STEPS = 12, 16, 3, 11


class Network(nn.Module):
    """Tied embedding and head, layers of uneven shapes, and one that only every other batch uses."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, width)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.seldom = nn.Linear(2 * width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.up(self.embedding(words))))
        if words.sum() % 2:
            x = torch.tanh(self.seldom(x))
        return nn.functional.linear(self.down(x), self.embedding.weight)


def batches(count: int = STEPS) -> list[Tensor]:
    """Words; the layer ``seldom`` is not used in the first step, nor in every other one."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(WORDS - 1, (count, 6), generator=generator)
    drawn[:, 0] += (drawn.sum(1) + torch.arange(count)) % 2
    return list(drawn)


def loss_of(model: Callable[[Tensor], Tensor], words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).float(), words)


def build(network: nn.Module | None = None, rank: int | None = 4, **options: object) -> tuple[nn.Module, GrassAdamW]:
    """A model and its optimizer: linear layers by rows, the rest at full rank."""
    model = Network() if network is None else network
    settings = {"lr": 1e-2, "update_interval": INTERVAL, "selection": "multinomial_norm", **options}
    if rank is None:
        return model, GrassAdamW(model.parameters(), **settings)
    return model, GrassAdamW(grass.param_groups(model, rank=rank, targets="all-linear"), **settings)


def train(
    model: nn.Module,
    optimizer: GrassAdamW,
    data: list[Tensor],
    before_step: Callable[[], object] = lambda: None,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> None:
    """The ordinary loop. The learning rate changes in every step."""
    for words in data:
        loss(model, words).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def assert_same(ours: tuple[nn.Module, GrassAdamW], theirs: tuple[nn.Module, GrassAdamW]) -> None:
    """Weights and state equal to the bit."""
    for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(a, b), name
    states = [optimizer.state_dict()["state"] for _, optimizer in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        for name, value in state.items():
            other = states[1][key][name]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, (key, name)


def trained_both_ways(make: Callable[[], tuple[nn.Module, GrassAdamW]], **how: object) -> None:
    """Assert that both ways end alike."""
    ordinary, ours = make(), make()
    train(*ordinary, batches(), **how)
    step_in_backward(ours[1])
    train(*ours, batches(), **how)
    assert_same(ours, ordinary)


@pytest.mark.parametrize("fused", [None, False], ids=["compiled", "operators"])
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("explore", [1.0, 0.25, 0])
@pytest.mark.parametrize("dim", [0, 1])
def test_equals_the_ordinary_loop(dim: int, explore: float, policy: str, fused: bool | None) -> None:
    trained_both_ways(lambda: build(dim=dim, explore=explore, state_policy=policy, fused=fused))


@pytest.mark.parametrize(
    "options",
    [
        {"state_policy": "reset", "warmup_after_refresh": 2},
        {"state_policy": "reset", "warmup_after_refresh": 2, "fused": False},
        {"decay": "all", "maximize": True},
        {"replacement": True, "explore": 0},
        {"moment_dtype": "bfloat16"},
        {"moment_dtype": "8bit", "state_policy": "bank", "bank_dtype": "bfloat16"},
        {"foreach": True, "rank": None},
        {"rank": None},
        PAPER,
        {},
    ],
    ids=lambda options: ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults",
)
def test_equals_the_ordinary_loop_with(options: dict[str, object]) -> None:
    trained_both_ways(lambda: build(**options))


@pytest.mark.parametrize("rounding", [False, True])
def test_half_precision(rounding: bool) -> None:
    trained_both_ways(lambda: build(Network(torch.bfloat16), stochastic_rounding=rounding))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_weights_that_threads_share(dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        trained_both_ways(lambda: build(Network(width=160), dim=dim, rank=0.25))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("saved", [2, 3, 4])
@pytest.mark.parametrize("before", ["in backward", "ordinary"])
def test_resume(before: str, saved: int, policy: str) -> None:
    """Before, at and after a refresh; from runs of both kinds."""
    options = {"state_policy": policy, "explore": 0.25}
    whole, first, second = (build(**options) for _ in range(3))
    train(*whole, batches())
    if before == "in backward":
        step_in_backward(first[1])
    train(*first, batches()[:saved])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    step_in_backward(second[1])
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*second, batches()[saved:])
    assert_same(second, whole)


def test_clip_limits_each_parameter() -> None:
    ordinary, ours = build(), build()
    handle, norms = step_in_backward(ours[1], max_norm=0.05), []

    def clip_each() -> None:
        gradients = [p.grad for p in ordinary[0].parameters() if p.grad is not None]
        norms.append((get_total_norm(gradients), max(g.norm() for g in gradients)))
        for p in ordinary[0].parameters():
            clip_grad_norm_([p], 0.05)

    train(*ordinary, batches(), clip_each)
    assert max(largest for _, largest in norms) > 0.05
    measured: list[Tensor] = []
    train(*ours, batches(), lambda: measured.append(handle.grad_norm))
    assert_same(ours, ordinary)
    torch.testing.assert_close(torch.stack(measured), torch.stack([norm for norm, _ in norms]))


def test_an_infinite_clip_only_measures() -> None:
    ordinary, ours = build(), build()
    handle = step_in_backward(ours[1], max_norm=math.inf)
    train(*ordinary, batches())
    train(*ours, batches())
    assert_same(ours, ordinary)
    assert handle.grad_norm > 0


def test_one_gradient_at_a_time() -> None:
    """No other gradient is alive, neither in a parameter nor anywhere else, when one has just been completed."""
    model, optimizer = build()
    seen: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def record(p: Tensor) -> None:
        most.append(sum(storage() is not None for storage in seen) + 1)
        seen.append(weakref.ref(p.grad.untyped_storage()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(record)
    step_in_backward(optimizer)
    train(model, optimizer, batches())
    assert len(most) > STEPS
    assert max(most) == 1
    seen.clear()
    optimizer.in_backward.close()
    train(model, optimizer, batches(1))
    assert max(most) > 5, "the ordinary loop holds all"


def test_a_second_backward_is_refused_before_anything_changes() -> None:
    (model, optimizer), ordinary = build(), build()
    step_in_backward(optimizer)
    data = batches()
    loss_of(model, data[0]).backward()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(RuntimeError, match=r"down\.weight got a gradient again .* gradients cannot be accumulated"):
        loss_of(model, data[1]).backward()
    with pytest.raises(RuntimeError, match="got a gradient again"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
    optimizer.step()
    train(model, optimizer, data[1:])
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    for words in data[:1]:
        loss_of(ordinary[0], words).backward()
        ordinary[1].step()
        ordinary[1].zero_grad()
    train(*ordinary, data[1:])
    assert_same((model, optimizer), ordinary)


def test_two_losses_of_separate_parameters() -> None:
    def both(model: nn.Module, words: Tensor) -> Tensor:
        model.up.weight.square().sum().backward()
        return model.down.weight.square().sum()

    trained_both_ways(build, loss=both)


def test_loading_gives_up_a_step_that_has_begun() -> None:
    ordinary, ours = build(), build()
    step_in_backward(ours[1])
    start = copy.deepcopy([part.state_dict() for part in ours])
    loss_of(ours[0], batches()[1]).backward()
    for part, state in zip(ours, start, strict=True):
        part.load_state_dict(state)
    train(*ours, batches())
    train(*ordinary, batches())
    assert_same(ours, ordinary)


@pytest.mark.parametrize("inside", [False, True], ids=["forward", "forward and backward"])
def test_autocast(inside: bool) -> None:
    def loss(model: nn.Module, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss_of(model, words)
            if inside:
                value.backward()
        return torch.zeros((), requires_grad=True) if inside else value

    trained_both_ways(build, loss=loss)


def test_activation_checkpointing() -> None:
    def loss(model: nn.Module, words: Tensor) -> Tensor:
        def twice(words: Tensor) -> Tensor:
            return model(words) + checkpoint(model, words, use_reentrant=False)

        return loss_of(twice, words)

    trained_both_ways(build, loss=loss)


def test_reentrant_checkpoints_that_share_a_parameter() -> None:
    model, optimizer = build()
    step_in_backward(optimizer)
    x = torch.randn(4, WIDTH, requires_grad=True)
    layers = nn.Sequential(model.up, nn.Tanh(), model.down)
    twice = checkpoint(layers, checkpoint(layers, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        twice.sum().backward()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_model(fresh_dynamo) -> None:
    ordinary, ours = build(), build()
    step_in_backward(ours[1])
    for model, optimizer in (ordinary, ours):
        compiled = torch.compile(model, backend="aot_eager")
        train(model, optimizer, batches(), loss=lambda _, words, compiled=compiled: loss_of(compiled, words))
    assert_same(ours, ordinary)


def test_compiled_step(fresh_dynamo) -> None:
    """A compiled function that holds forward, backward and step."""

    def whole_step(model: nn.Module, optimizer: GrassAdamW, words: Tensor) -> None:
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()

    ordinary, ours = build(), build()
    step_in_backward(ours[1])
    compiled = torch.compile(whole_step, backend="aot_eager")
    for words in batches():
        whole_step(*ordinary, words)
        compiled(*ours, words)
    assert_same(ours, ordinary)


def test_weights_thawed_and_groups_added() -> None:
    """They are stepped like the others; from their second step on in backward."""
    runs = build(), build()
    step_in_backward(runs[1][1])
    for model, optimizer in runs:
        extra = nn.Parameter(torch.ones(WORDS))

        def loss(model: nn.Module, words: Tensor, extra: Tensor = extra) -> Tensor:
            return nn.functional.cross_entropy(model(words) * extra, words)

        model.up.weight.requires_grad_(False)
        train(model, optimizer, batches()[:3], loss=loss)
        model.up.weight.requires_grad_(True)
        extra.grad = None
        optimizer.add_param_group({"params": [("extra", extra)]})
        train(model, optimizer, batches()[3:], loss=loss)
    assert_same(runs[1], runs[0])
    loss(model, batches()[0]).backward()
    assert model.up.weight.grad is None
    assert extra.grad is None


def test_gradients_set_by_hand() -> None:
    def loss(model: nn.Module, words: Tensor) -> Tensor:
        parameters = [p for name, p in model.named_parameters() if "seldom" not in name]
        used = nn.functional.linear(model.down(model.norm(model.up(model.embedding(words)))), model.embedding.weight)
        for p, g in zip(parameters, torch.autograd.grad(used.square().sum(), parameters), strict=True):
            p.grad = g
        return torch.zeros((), requires_grad=True)

    trained_both_ways(build, loss=loss)


def test_close() -> None:
    ordinary, ours = build(), build()
    handle = step_in_backward(ours[1])
    train(*ours, batches()[:4])
    loss_of(ours[0], batches()[4]).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.step\(\) before close\(\)"):
        handle.close()
    ours[1].step()
    handle.close()
    assert not hasattr(ours[1], "_step_supports_amp_scaling")
    ours[1].param_groups[0]["lr"] *= 0.9
    ours[1].param_groups[1]["lr"] *= 0.9
    train(*ours, batches()[5:])
    train(*ordinary, batches())
    assert_same(ours, ordinary)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_step_in_backward(copied: Callable[[object], object], max_norm: float | None) -> None:
    """And clip alike; a copy's handle is its own."""
    ours = build()
    handle = step_in_backward(ours[1], max_norm=max_norm)
    train(*ours, batches()[:3])
    other = copied(ours)
    train(*ours, batches()[3:])
    gradients: list[Tensor | None] = []
    train(*other, batches()[3:], lambda: gradients.append(other[0].up.weight.grad))
    assert gradients == [None] * len(batches()[3:])
    assert_same(ours, other)
    assert other[1].in_backward is not handle
    other[1].in_backward.close()
    loss_of(ours[0], batches()[0]).backward()
    assert ours[0].up.weight.grad is None


def test_a_dropped_optimizer_steps_nothing() -> None:
    model, optimizer = build()
    step_in_backward(optimizer)
    del optimizer
    gc.collect()
    loss_of(model, batches()[0]).backward()
    assert model.up.weight.grad is not None
    step_in_backward(GrassAdamW(model.parameters()))


def test_no_false_alarm(caplog) -> None:
    model, optimizer = build()
    step_in_backward(optimizer)
    with caplog.at_level(logging.WARNING, "grass"):
        train(model, optimizer, batches() * 2)
    assert not caplog.records


def test_grad_scaler_is_refused() -> None:
    model, optimizer = build()
    step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for unscale in (False, True):
        scaler.scale(loss_of(model, batches()[0])).backward()
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="GradScaler cannot be used"):
            scaler.step(optimizer)
        scaler, optimizer._going_on = torch.amp.GradScaler("cpu"), None
        del optimizer.found_inf, optimizer.grad_scale


def test_a_disabled_scaler_changes_nothing() -> None:
    ordinary, ours = build(), build()
    step_in_backward(ours[1])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for words in batches():
        loss_of(ordinary[0], words).backward()
        ordinary[1].step()
        ordinary[1].zero_grad()
        scaler.scale(loss_of(ours[0], words)).backward()
        scaler.step(ours[1])
        scaler.update()
    assert_same(ours, ordinary)


@pytest.mark.parametrize("rank", [None, 4], ids=["full", "dense"])
def test_a_graph_from_before_the_step_is_refused(rank: int | None) -> None:
    """As after an ordinary step: its backward would compute with weights of which some have been stepped."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = GrassAdamW(model.parameters(), rank=rank)
    step_in_backward(optimizer)
    first, second = (model(torch.randn(4, 8)).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_weight_that_is_read_again_after_its_step_is_refused() -> None:
    """Backward has stepped the weight when it comes to the first product, which takes it as a constant."""
    weight = nn.Parameter(torch.randn(4, 4))
    before = nn.Parameter(torch.randn(4, 4))
    optimizer = GrassAdamW([weight, before], rank=2)
    step_in_backward(optimizer)
    constant = (before @ torch.eye(4)) @ weight.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (constant.tanh() @ weight).sum().backward()


def test_a_closure_is_refused_before_it_runs() -> None:
    _, optimizer = build()
    step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="A closure runs backward inside"):
        optimizer.step(lambda: pytest.fail("the closure ran"))


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    optimizer = GrassAdamW(embedding.parameters())
    step_in_backward(optimizer)
    with pytest.raises(TypeError, match="takes dense gradients"):
        embedding(torch.arange(3)).sum().backward()


def converted() -> GrassAdamW:
    model = Network()
    grass.compact(model, rank=4)
    return GrassAdamW(model)


@pytest.mark.parametrize(
    ("make", "clip", "error", "message"),
    [
        (lambda: torch.optim.AdamW(Network().parameters()), None, TypeError, r"grass\.GrassAdamW, got AdamW"),
        (lambda: build()[1], 0.0, ValueError, r"Invalid max_norm=0\.0: must be a number > 0 or None"),
        (lambda: build()[1], math.nan, ValueError, "Invalid max_norm=nan"),
        (lambda: build()[1], "1", TypeError, "Invalid max_norm='1'"),
        (converted, None, ValueError, "takes dense mode, but 3 layers were converted"),
    ],
    ids=["AdamW", "0", "nan", "text", "compact"],
)
def test_what_it_does_not_take(make, clip, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_in_backward(make(), max_norm=clip)


def test_one_optimizer_for_each_parameter() -> None:
    model, optimizer = build()
    first = step_in_backward(optimizer)
    with pytest.raises(ValueError, match="steps in backward already"):
        step_in_backward(optimizer)
    second = GrassAdamW([model.norm.weight])
    with pytest.raises(ValueError, match=r"shape \(32,\) is stepped in backward by another optimizer"):
        step_in_backward(second)
    first.close()
    step_in_backward(second)


def test_two_optimizers_of_separate_parameters() -> None:
    runs = Network(), Network()
    for i, model in enumerate(runs):
        head, *body = model.parameters()
        optimizers = GrassAdamW([head]), GrassAdamW(body, rank=4)
        for optimizer in optimizers if i else ():
            step_in_backward(optimizer)
        for words in batches():
            loss_of(model, words).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in runs), strict=True))


def refusals(rank: int) -> list[str]:
    """What is said to several processes, and to a sharded parameter."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    messages = []
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Replicate()]))
    alone = [torch.distributed.new_group([i]) for i in range(2)][rank]
    for parameter, group in ((nn.Parameter(torch.ones(4, 4)), None), (weight, alone)):
        optimizer = GrassAdamW([parameter])
        optimizer.process_group = group
        try:
            step_in_backward(optimizer)
        except ValueError as error:
            messages.append(str(error))
    trained = nn.Parameter(torch.ones(4, 4))
    optimizer = GrassAdamW([trained])
    optimizer.process_group = alone
    step_in_backward(optimizer)
    trained.sum().backward()
    assert trained.grad is None
    return messages


@pytest.mark.slow
def test_several_processes_are_refused() -> None:
    for messages in run_world(refusals, 2):
        assert "takes one process, got 2" in messages[0]
        assert "takes whole parameters, got a DTensor of shape (4, 4)" in messages[1]


class Fails(torch.autograd.Function):
    """Its backward raises while ``now`` holds."""

    now = True

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        if Fails.now:
            raise ArithmeticError("on purpose")
        return grad


def test_an_error_in_backward_is_named_and_ended_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = GrassAdamW(model.named_parameters(), rank=2)
    step_in_backward(optimizer)

    def loss() -> Tensor:
        return model[1](Fails.apply(model[0](torch.ones(2, 4)))).square().sum()

    with pytest.raises(ArithmeticError):
        loss().backward()
    monkeypatch.setattr(Fails, "now", False)
    with pytest.raises(RuntimeError, match=r"^1\.(weight|bias) got a gradient again .* was stopped, by an error"):
        loss().backward()
    optimizer.zero_grad()
    optimizer.step()
    before = model[0].weight.detach().clone()
    for _ in range(2):
        loss().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before)
    loss().backward()
    with pytest.raises(RuntimeError, match="gradients cannot be accumulated"):
        loss().backward()
