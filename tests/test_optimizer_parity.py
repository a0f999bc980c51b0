"""At full rank GrassAdamW is AdamW, step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grass import PAPER, GrassAdamW
from tests.reference import gradients_for, relative_difference, run, train

# Per tensor, ||difference|| / ||weight|| after fifty steps in fp32. The two round their operations in another order.
RTOL = 1e-6
HYPER = dict(lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
RULES = ["top_r", "multinomial_norm", "multinomial_norm_sq", "uniform"]


@pytest.fixture(scope="module")
def adamw_run(tiny_llama: Callable[..., torch.nn.Module], token_batches: list[torch.Tensor]):
    """Fifty steps of torch's AdamW: the trained model and its losses."""
    model = tiny_llama()
    losses = train(model, torch.optim.AdamW(model.parameters(), **HYPER), token_batches)
    return model, losses


def difference(tiny_llama, token_batches, adamw_run, **options: object) -> float:
    """The largest relative difference of any tensor between GrassAdamW's fifty steps and AdamW's."""
    expected, expected_losses = adamw_run
    model = tiny_llama()
    optimizer = GrassAdamW(model.parameters(), rank=1.0, **{**PAPER, **HYPER, **options})
    losses = train(model, optimizer, token_batches)
    assert losses[-1] < 0.8 * losses[0], "a run that learns nothing proves nothing"
    assert losses[0] == expected_losses[0]
    return max(
        relative_difference(ours, theirs)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize("dim", [0, 1, "auto"], ids=["rows", "columns", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_without_refresh(tiny_llama, token_batches, adamw_run, rule: str, dim: int | str) -> None:
    """The paper's reset would forget the moments, so the first selection is the only one."""
    options = dict(selection=rule, dim=dim, update_interval=1000)
    assert difference(tiny_llama, token_batches, adamw_run, **options) < RTOL


@pytest.mark.parametrize("policy", ["keep", "bank"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_across_refreshes(tiny_llama, token_batches, adamw_run, policy: str, dim: int) -> None:
    """Every row is chosen again every time, so a policy that keeps moments changes nothing."""
    options = dict(state_policy=policy, dim=dim, update_interval=7)
    assert difference(tiny_llama, token_batches, adamw_run, **options) < RTOL


def test_decay_of_all_rows_is_the_same(tiny_llama, token_batches, adamw_run) -> None:
    assert difference(tiny_llama, token_batches, adamw_run, decay="all", update_interval=1000) < RTOL


def test_resets_do_change_training(tiny_llama, token_batches, adamw_run) -> None:
    """The tests above can fail: forgetting the moments at refreshes shows in the weights."""
    assert difference(tiny_llama, token_batches, adamw_run, state_policy="reset", update_interval=7) > 1e-3


@pytest.mark.parametrize("parameters", [[(7,)], [()], [(5, 3), (4,)], [(4, 3, 2, 2), (6, 2), (1,)]], ids=str)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_without_rank_it_is_torch_adamw(parameters: list[tuple[int, ...]], maximize: bool) -> None:
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in parameters]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    gradients = gradients_for(ours, 10)
    optimizer = GrassAdamW(ours, **HYPER, maximize=maximize)
    control = torch.optim.AdamW(theirs, **HYPER, maximize=maximize)
    run(optimizer, ours, gradients)
    run(control, theirs, gradients)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)  # torch's own default for fp32: fused and foreach differ in rounding
        our_state, their_state = optimizer.state[our], control.state[their]
        assert our_state.keys() == their_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in their_state.items():
            assert our_state[key].dtype == value.dtype
            torch.testing.assert_close(our_state[key], value)


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (6, 6), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_shapes_at_full_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    theirs = torch.nn.Parameter(ours.detach().clone())
    gradients = gradients_for([ours], 20)
    run(GrassAdamW([ours], rank=1.0, **PAPER, **HYPER), [ours], gradients)
    run(torch.optim.AdamW([theirs], **HYPER), [theirs], gradients)
    assert relative_difference(ours, theirs) < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
def test_rows_with_ages_of_their_own_are_as_precise_as_their_weight(policy: str) -> None:
    """Ages are float32, which is exact; powers of them are not."""
    ours = torch.nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    gradients = gradients_for([ours], 20)
    options = {**PAPER, **HYPER, "state_policy": policy, "update_interval": 1000, "bank_dtype": "float32"}
    run(GrassAdamW([ours], rank=1.0, **options), [ours], gradients)
    run(torch.optim.AdamW([theirs], **HYPER), [theirs], gradients)
    assert relative_difference(ours, theirs) < 1e-14
