"""State policies and refreshes, told by gradients that dictate the selection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from grass import PAPER, GrassAdamW
from grass.memory import state_bytes
from grass.state.bank import to_host
from grass.state.schema import HOST_KEYS

ROWS, COLUMNS = 6, 8
HYPER = dict(PAPER, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, dim=0)
POLICIES = ["reset", "keep", "bank"]


def gradient(*rows: int, value: float = 1.0) -> Tensor:
    """Large in the given rows, small elsewhere: ``top_r`` takes exactly these."""
    result = torch.full((ROWS, COLUMNS), 0.01)
    result[list(rows)] = value
    return result


def step(optimizer: GrassAdamW, weight: Parameter, grad: Tensor) -> dict:
    weight.grad = grad
    optimizer.step()
    return optimizer.state[weight]


def make(policy: str, interval: int = 2, rank: int = 2, **options: object) -> tuple[Parameter, GrassAdamW]:
    weight = Parameter(torch.ones(ROWS, COLUMNS))
    arguments = {**HYPER, "rank": rank, "update_interval": interval, "state_policy": policy, **options}
    return weight, GrassAdamW([weight], **arguments)


def first_moment(steps: int) -> float:
    """``exp_avg`` after so many gradients of one: 1 - beta1^steps."""
    return 1 - 0.9**steps


# Rows 1 and 4 for two steps, then 1 and 2 for two, then 2 and 4: row 1 is chosen twice in a row, 4 returns after a gap.
SCRIPT = [(1, 4), (1, 4), (1, 2), (1, 2), (2, 4), (2, 4)]
# (policy, Adam steps behind rows 1 and 2 after step 3, and behind rows 2 and 4 after step 5)
HISTORIES = [("reset", (1, 1), (1, 1)), ("keep", (3, 1), (3, 1)), ("bank", (3, 1), (3, 3))]


@pytest.mark.parametrize(("policy", "third", "fifth"), HISTORIES, ids=POLICIES)
def test_what_survives_a_refresh(policy: str, third: tuple[int, int], fifth: tuple[int, int]) -> None:
    weight, optimizer = make(policy)
    for number, rows in enumerate(SCRIPT, start=1):
        state = step(optimizer, weight, gradient(*rows))
        assert state["indices"].tolist() == list(rows)
        if number in (3, 5):
            steps = third if number == 3 else fifth
            expected = torch.tensor([first_moment(s) for s in steps])[:, None].expand(2, COLUMNS)
            torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-6, atol=0)  # fp32
            assert state["refresh_step"] == number - 1
            assert state["refreshes"] == (number + 1) // 2
            if policy == "reset":
                assert "row_steps" not in state
            else:
                assert state["row_steps"].tolist() == list(steps)
    assert state["step"] == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_constant_gradients_move_by_lr(policy: str) -> None:
    """With right bias correction every step of every chosen row is ``lr``, whatever its history."""
    weight, optimizer = make(policy)
    for rows in SCRIPT:
        before = weight.detach().clone()
        step(optimizer, weight, gradient(*rows))
        moved = before - weight.detach()
        torch.testing.assert_close(moved[list(rows)], torch.full((2, COLUMNS), 1e-2), rtol=1e-4, atol=0)  # fp32 near 1
        rest = [row for row in range(ROWS) if row not in rows]
        assert torch.equal(weight.detach()[rest], before[rest])


def test_bank_is_on_the_host_and_full_size() -> None:
    weight, optimizer = make("bank")
    state = step(optimizer, weight, gradient(1, 4))
    for key in ("bank_exp_avg", "bank_exp_avg_sq"):
        assert state[key].shape == (ROWS, COLUMNS)
        assert state[key].device.type == "cpu"
    assert state["bank_steps"].shape == (ROWS,)


def test_a_bank_brought_to_the_device_returns() -> None:
    """As Lightning does with all state when it resumes; by fake tensors, which need no such device."""
    weight, optimizer = make("bank")
    state = step(optimizer, weight, gradient(1, 4))
    with FakeTensorMode():
        moved = {key: torch.empty(2, device="cuda") for key in ("exp_avg", *HOST_KEYS)}
        assert {t.device.type for t in moved.values()} == {"cuda"}
        to_host(moved)
        assert {key for key, t in moved.items() if t.device.type == "cpu"} == HOST_KEYS <= state.keys()


def test_bf16_bank_rounds_once() -> None:
    """A row that returns has its moments to bf16's eight bits, and its step count exactly."""
    weight, optimizer = make("bank", interval=300, bank_dtype="bfloat16")
    for _ in range(300):
        step(optimizer, weight, gradient(1, 4))
    for _ in range(300):
        step(optimizer, weight, gradient(0, 2))
    state = step(optimizer, weight, gradient(1, 4))
    assert state["bank_exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg"].dtype == torch.float32
    assert state["row_steps"].tolist() == [301, 301]
    expected = torch.full((2, COLUMNS), 1 - 0.99**301)
    torch.testing.assert_close(state["exp_avg_sq"], expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("length", "factors"), [(0, [1] * 4), (2, [0.5, 1, 1, 1]), (4, [0.25, 0.5, 0.75, 1])])
@pytest.mark.parametrize("policy", POLICIES)
def test_warmup(policy: str, length: int, factors: list[float]) -> None:
    """After each refresh but not in the beginning."""
    weight, optimizer = make(policy, interval=4, warmup_after_refresh=length)
    for expected in [1, 1, 1, 1, *factors, *factors]:
        before = weight.detach()[1].clone()
        step(optimizer, weight, gradient(1, 4))
        torch.testing.assert_close(
            before - weight.detach()[1], torch.full((COLUMNS,), 1e-2 * expected), rtol=1e-4, atol=0
        )
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refresh_from_zero_norms_stays_due(policy: str) -> None:
    weight, optimizer = make(policy)
    zero = torch.zeros(ROWS, COLUMNS)
    step(optimizer, weight, zero)
    assert step(optimizer, weight, gradient(3, 5))["indices"].tolist() == [3, 5]
    assert optimizer.state[weight]["refreshes"] == 1
    step(optimizer, weight, gradient(3, 5))
    assert step(optimizer, weight, zero)["indices"].tolist() == [3, 5]  # due now, and put off
    assert optimizer.state[weight]["refreshes"] == 1
    assert step(optimizer, weight, gradient(0, 1))["indices"].tolist() == [0, 1]
    assert optimizer.state[weight]["refreshes"] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_with_nan_are_not_chosen(bad: float) -> None:
    weight, optimizer = make("reset")
    grad = gradient(1, 4)
    grad[0, 3] = bad
    assert step(optimizer, weight, grad)["indices"].tolist() == [1, 4]
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_broken_row_does_not_spread(policy: str) -> None:
    """NaN that reaches the moments of a chosen row stays in that row."""
    weight, optimizer = make(policy)
    step(optimizer, weight, gradient(1, 4))
    grad = gradient(1, 4)
    grad[1] = math.nan
    step(optimizer, weight, grad)
    state = step(optimizer, weight, gradient(0, 4))
    assert state["indices"].tolist() == [0, 4]
    assert bool(state["exp_avg"].isfinite().all())
    assert weight.isfinite().all(dim=1).tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_moments_follow_a_changing_scale(policy: str) -> None:
    """Drawn again with another ``rho`` a row's moments are those it would have had under the new one all along."""
    weight, optimizer = make(policy, interval=1, rank=3, selection="multinomial_norm", replacement=True)
    scales = set()
    for number in range(30):
        grad = (1 + (torch.arange(ROWS) + number) % 3).float()[:, None].expand(ROWS, COLUMNS)  # 1, 2 and 3, in turn
        state = step(optimizer, weight, grad.contiguous())
        scales |= {round(s, 4) for s in state["row_scale"].tolist()}
        in_plain_units = state["exp_avg_sq"] / state["row_scale"][:, None] ** 2
        assert bool((in_plain_units <= 9 * (1 + 1e-5)).all()), "an average of squares of gradients no larger than 3"
        for row in set(state["indices"].tolist()):
            same = state["exp_avg"][state["indices"] == row]
            assert torch.equal(same, same[:1].expand_as(same)), "slots of one row share its history"
    assert len(scales) > 2


def test_switching_policy_between_runs() -> None:
    """A group's policy may change under way: what the new one needs appears, what it does not need goes."""
    weight, optimizer = make("bank")
    for rows in SCRIPT[:2]:
        step(optimizer, weight, gradient(*rows))
    optimizer.param_groups[0]["state_policy"] = "reset"
    state = step(optimizer, weight, gradient(1, 2))
    assert state_bytes(optimizer).host == 0
    assert "row_steps" not in state
    step(optimizer, weight, gradient(1, 2))
    optimizer.param_groups[0]["state_policy"] = "keep"
    state = step(optimizer, weight, gradient(2, 4))
    assert state["row_steps"].tolist() == [3, 1]
