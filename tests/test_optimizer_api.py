"""GrassAdamW behaves as any ``torch.optim`` optimizer does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

import grass
from grass import PAPER, GrassAdamW
from tests.reference import assert_same_state, gradients_for, run

OPTIONS = dict(PAPER, lr=1e-2, rank=2, update_interval=3, selection="multinomial_norm", weight_decay=0.1)
POLICIES = ["reset", "keep", "bank"]
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer))}


def parameters(seed: int = 0) -> list[Parameter]:
    """Two weights, a bias and a convolution."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in [(6, 8), (9, 4), (7,), (4, 3, 2, 2)]]


def equal(first: list[Parameter], second: list[Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_public_names() -> None:
    for name in ("GrassAdamW", "Projector", "Selection", "param_groups", "register_rule"):
        assert name in grass.__all__
        assert hasattr(grass, name)
    assert issubclass(GrassAdamW, torch.optim.Optimizer)


def test_closure() -> None:
    (weight, *_) = parameters()
    optimizer = GrassAdamW([weight], **OPTIONS)
    losses = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    with torch.no_grad():
        returned = [optimizer.step(closure).item() for _ in range(5)]
    assert returned == losses
    assert losses[-1] < losses[0]


def test_step_without_closure_returns_none() -> None:
    ours = parameters()
    run(optimizer := GrassAdamW(ours, **OPTIONS), ours, gradients_for(ours, 1))
    assert optimizer.step() is None


def test_named_parameters() -> None:
    named, plain = parameters(), parameters()
    optimizer = GrassAdamW([(f"layer.{i}", p) for i, p in enumerate(named)], **OPTIONS)
    run(optimizer, named, gradients_for(named, 5))
    run(GrassAdamW(plain, **OPTIONS), plain, gradients_for(plain, 5))
    assert equal(named, plain)
    assert optimizer.param_groups[0]["param_names"] == ["layer.0", "layer.1", "layer.2", "layer.3"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["layer.0", "layer.1", "layer.2", "layer.3"]


def test_group_overrides() -> None:
    """Every keyword is a group key, and what a group does not say it takes from the defaults."""
    first, second, *_ = parameters()
    optimizer = GrassAdamW(
        [{"params": [first]}, {"params": [second], "rank": 3, "dim": 0, "update_interval": 2, "state_policy": "keep"}],
        **OPTIONS,
    )
    run(optimizer, [first, second], gradients_for([first, second], 5))
    assert optimizer.state[first]["exp_avg"].shape == (2, 8)
    assert optimizer.state[second]["exp_avg"].shape == (3, 4)
    assert optimizer.state[first]["refreshes"] == 2
    assert optimizer.state[second]["refreshes"] == 3
    assert "row_steps" in optimizer.state[second]
    assert "row_steps" not in optimizer.state[first]


def test_plain_group_beside_a_projected_one() -> None:
    ours, theirs = parameters()[:2], parameters()[:2]
    gradients = gradients_for(ours, 8)
    run(GrassAdamW([{"params": [ours[0]]}, {"params": [ours[1]], "rank": None}], **OPTIONS), ours, gradients)
    control = torch.optim.AdamW([theirs[1]], lr=1e-2, weight_decay=0.1)
    run(control, theirs[1:], [step[1:] for step in gradients])
    torch.testing.assert_close(ours[1], theirs[1])


def test_add_param_group() -> None:
    """A group added later equals the same group given at the start: selection seeds count across groups."""
    early, late = parameters(), parameters()
    gradients = gradients_for(early, 6)
    run(GrassAdamW([{"params": early[:1]}, {"params": early[1:], "rank": 1}], **OPTIONS), early, gradients)
    optimizer = GrassAdamW(late[:1], **OPTIONS)
    optimizer.add_param_group({"params": late[1:], "rank": 1})
    run(optimizer, late, gradients)
    assert equal(early, late)


def test_weights_of_one_shape_draw_rows_of_their_own() -> None:
    twins = [Parameter(torch.ones(40, 50)) for _ in range(2)]
    optimizer = GrassAdamW(twins, rank=10, selection="uniform")
    run(optimizer, twins, [[torch.ones(40, 50)] * 2])
    first, second = (optimizer.state[p]["indices"] for p in twins)
    assert not torch.equal(first, second)


def test_seed() -> None:
    def rows(seed: int) -> list[int]:
        weight = Parameter(torch.ones(40, 50))
        optimizer = GrassAdamW([weight], rank=10, selection="uniform", seed=seed)
        run(optimizer, [weight], [[torch.ones(40, 50)]])
        return optimizer.state[weight]["indices"].tolist()

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_global_generator_is_left_alone() -> None:
    ours = parameters()
    gradients = gradients_for(ours, 7)
    before = torch.get_rng_state()
    run(GrassAdamW(ours, **{**OPTIONS, "replacement": True}), ours, gradients)
    assert torch.equal(torch.get_rng_state(), before)


SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    "one cycle, with betas": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_lr_schedulers(scheduler) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, control = GrassAdamW(ours, rank=1.0), torch.optim.AdamW(theirs)
    our_schedule, their_schedule = scheduler(optimizer), scheduler(control)
    for step in gradients_for(ours, 10):
        run(optimizer, ours, [step])
        run(control, theirs, [step])
        our_schedule.step()
        their_schedule.step()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)  # fp32, ten steps


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_lr(policy: str) -> None:
    plain, tensor = parameters(), parameters()
    gradients = gradients_for(plain, 8)
    run(GrassAdamW(plain, **{**OPTIONS, "state_policy": policy, "warmup_after_refresh": 2}), plain, gradients)
    lr = torch.tensor(OPTIONS["lr"])
    optimizer = GrassAdamW(tensor, **{**OPTIONS, "lr": lr, "state_policy": policy, "warmup_after_refresh": 2})
    run(optimizer, tensor, gradients)
    for a, b in zip(plain, tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # lr itself is rounded to fp32
    assert lr.item() == pytest.approx(OPTIONS["lr"]), "warm-up must not write to it"
    before = [p.detach().clone() for p in tensor]
    lr.zero_()
    run(optimizer, tensor, gradients[:1])
    assert equal(tensor, before), "the optimizer follows the tensor it was given"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES.keys())
def test_copies_go_on_alike(through, policy: str) -> None:
    ours = parameters()
    gradients = gradients_for(ours, 12)
    optimizer = GrassAdamW(ours, **{**OPTIONS, "state_policy": policy, "warmup_after_refresh": 2})
    run(optimizer, ours, gradients[:4])
    copied_parameters, copied = through((ours, optimizer))
    assert copied_parameters[0] is not ours[0]
    run(optimizer, ours, gradients[4:])
    run(copied, copied_parameters, gradients[4:])
    assert equal(ours, copied_parameters)
    assert_same_state(copied.state_dict(), optimizer.state_dict())


def test_copied_before_the_first_step() -> None:
    ours = parameters()
    copied_parameters, copied = copy.deepcopy((ours, optimizer := GrassAdamW(ours, **OPTIONS)))
    gradients = gradients_for(ours, 5)
    run(optimizer, ours, gradients)
    run(copied, copied_parameters, gradients)
    assert equal(ours, copied_parameters)


def test_step_hooks() -> None:
    ours, calls = parameters(), []
    optimizer = GrassAdamW(ours, **OPTIONS)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run(optimizer, ours, gradients_for(ours, 2))
    assert calls == ["before", "after"] * 2


def test_grad_scaler() -> None:
    """A scale of a power of two changes no bit; an overflow skips the step and counts nothing."""
    plain, scaled = parameters(), parameters()
    first, second = GrassAdamW(plain, **OPTIONS), GrassAdamW(scaled, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, step in enumerate(gradients_for(plain, 7)):
        run(first, plain, [step])
        if i == 3:  # where a refresh is due
            for parameter in scaled:
                parameter.grad = torch.full_like(parameter, torch.inf)
            scaler.step(second)
            scaler.update(2.0**10)
        for parameter, gradient in zip(scaled, step, strict=True):
            parameter.grad = scaler.scale(gradient.float())
        scaler.step(second)
        scaler.update(2.0**10)
    assert equal(plain, scaled)
    assert_same_state(second.state_dict(), first.state_dict())


def test_parameters_without_gradient_wait() -> None:
    """Each keeps its own count, so the refresh of one that was skipped falls due later; the others do not notice."""
    ours, control = parameters(), parameters()
    frozen = ours[0].detach().clone()
    optimizer = GrassAdamW(ours, **OPTIONS)
    gradients = gradients_for(ours, 4)
    for step in gradients:
        for parameter, gradient in zip(ours, step, strict=True):
            parameter.grad = None if parameter is ours[0] else gradient.float()
        optimizer.step()
    assert torch.equal(ours[0], frozen)
    assert not optimizer.state.get(ours[0])
    assert optimizer.state[ours[1]]["step"] == 4
    assert optimizer.state[ours[1]]["refreshes"] == 2
    run(GrassAdamW(control, **OPTIONS), control, gradients)
    assert equal(ours[1:], control[1:])
