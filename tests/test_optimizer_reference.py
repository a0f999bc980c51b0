"""The whole method below full rank against a dense, slow reference, over several refreshes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grass import PAPER, GrassAdamW
from grass.selection.exploration import draw_explored
from tests.reference import ReferenceGrass, gradients_for, run, uneven_gradients

SHAPE, RANK, INTERVAL, STEPS = (7, 9), 3, 4, 14
RULES = {
    "top_r": dict(selection="top_r"),
    **{
        f"{rule}, {'with' if replacement else 'without'}": dict(selection=rule, replacement=replacement)
        for rule in ("multinomial_norm", "multinomial_norm_sq", "uniform")
        for replacement in (False, True)
    },
}
HYPER = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
# fp64 weights, so that a wrong formula cannot hide in rounding. Row step counts are fp32, and with them the bias
# correction under keep and bank; rho is fp32 too, and moments are multiplied by ratios of it.
TOLERANCE = {
    "reset": dict(rtol=1e-11, atol=1e-12),
    "keep": dict(rtol=2e-6, atol=2e-7),
    "bank": dict(rtol=2e-6, atol=2e-7),
}


def compare(dim: int, tolerance: dict, *, shape: tuple[int, int] = SHAPE, steps: int = STEPS, **options: object) -> int:
    """Run both; returns how many different selections there were."""
    reference_options = {k: v for k, v in options.items() if k not in ("rank", "selection", "replacement", "explore")}
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    optimizer = GrassAdamW([parameter], **{**PAPER, "dim": dim, **options})
    reference = ReferenceGrass(parameter, dim=dim, **reference_options)
    state, chosen = optimizer.state[parameter], set()
    for gradient in uneven_gradients(shape, steps):
        parameter.grad = gradient.clone()
        due, before = reference.refresh_due, state.get("indices")
        before = None if before is None else before.clone()
        optimizer.step()
        state = optimizer.state[parameter]
        if due:
            check_selection(gradient.norm(dim=1 - dim), state, options)
            reference.choose(state["indices"], state.get("row_scale"))
            chosen.add(tuple(state["indices"].tolist()))
        else:
            assert torch.equal(state["indices"], before), "rows may change at a refresh only"
        if options.get("explore"):
            explore(reference, state, options["explore"], shape[dim])
            reference.scale = options.get("scale", shape[dim] / (len(state["indices"]) + len(reference.explored)))
        reference.step(gradient)
        torch.testing.assert_close(parameter.data, reference.weight, **tolerance)
    return len(chosen)


def explore(reference: ReferenceGrass, state: dict, explored: int | float, size: int) -> None:
    """Give the reference the rows of this step, and how far they move."""
    others = sorted(set(range(size)) - set(state["indices"].tolist()))
    if explored == 1.0 and isinstance(explored, float):
        reference.explored = others
        return
    drawn = draw_explored(state["indices"], size, explored, seed=0, parameter=0, step=reference.steps).tolist()
    assert len(set(drawn)) == explored
    assert set(drawn) <= set(others)
    reference.turns = len(others) / explored
    reference.explored, reference.reach = drawn, min(len(others) / explored, max(1.0, 6 * (explored / size) ** 0.5))


def check_selection(norms: Tensor, state: dict, options: dict) -> None:
    """The rows answer to this very gradient: the largest, or ones with the scale their probabilities ask for."""
    indices = state["indices"]
    if options.get("selection", "top_r") == "top_r":
        assert set(indices.tolist()) == set(norms.argsort(descending=True)[: len(indices)].tolist())
    if options.get("replacement"):
        weights = {"multinomial_norm": norms, "multinomial_norm_sq": norms**2, "uniform": torch.ones_like(norms)}
        q = weights[options["selection"]] / weights[options["selection"]].sum()
        expected = (len(indices) * q[indices]).rsqrt().float()
        torch.testing.assert_close(state["row_scale"], expected, rtol=1e-5, atol=0)
    else:
        assert "row_scale" not in state


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_rule_policy_and_dim(rule: dict, dim: int, policy: str) -> None:
    selections = compare(
        dim, TOLERANCE[policy], rank=RANK, update_interval=INTERVAL, state_policy=policy, **rule, **HYPER
    )
    assert selections > 2


OPTIONS = {
    "warm-up": dict(warmup_after_refresh=3),
    "warm-up longer than the interval": dict(warmup_after_refresh=9),
    "maximize": dict(maximize=True),
    "decay all": dict(decay="all"),
    "no decay": dict(weight_decay=0.0),
    "scale": dict(scale=0.25),
    "refresh at every step": dict(update_interval=1),
    "rank one": dict(rank=1),
    "warm-up, scale, decay all": dict(warmup_after_refresh=2, scale=2.0, decay="all"),
}


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict, policy: str) -> None:
    arguments = {"rank": RANK, "update_interval": INTERVAL, "state_policy": policy, **HYPER, **options}
    compare(1, TOLERANCE[policy], selection="multinomial_norm", **arguments)


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS.keys()])
@pytest.mark.parametrize("explored", [1.0, 2, 1], ids=["all", "two", "one"])
def test_explored(options: dict, explored: int | float, dim: int, policy: str) -> None:
    """The reference finds the direction of the selected rows from what they moved, which costs digits."""
    arguments = {"rank": RANK, "update_interval": INTERVAL, "state_policy": policy, **HYPER, **options}
    tolerance = {key: 100 * value for key, value in TOLERANCE[policy].items()}
    compare(dim, tolerance, selection="multinomial_norm", explore=explored, **arguments)


@pytest.mark.parametrize("decay", ["selected", "all"])
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
def test_many_duplicates(policy: str, decay: str) -> None:
    """Five draws from four rows repeat some; each row decays once and its slots add up."""
    arguments = dict(rank=4, update_interval=3, state_policy=policy, decay=decay, **HYPER)
    compare(0, TOLERANCE[policy], shape=(4, 5), selection="multinomial_norm", replacement=True, **arguments)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.01, 1.0])
@pytest.mark.parametrize("dim", [0, 1, "auto"], ids=["rows", "columns", "auto"])
def test_rank_as_fraction(fraction: float, dim: int | str) -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 12))
    parameter.grad = torch.randn_like(parameter)
    optimizer = GrassAdamW([parameter], **{**PAPER, "rank": fraction, "dim": dim})
    optimizer.step()
    size = 12 if dim == 1 else 8
    assert len(optimizer.state[parameter]["indices"]) == max(1, round(fraction * size))


@pytest.mark.parametrize(("shape", "moments"), [((8, 12), (2, 12)), ((12, 8), (12, 2)), ((8, 8), (2, 8))], ids=str)
def test_auto_picks_the_smaller_dimension(shape: tuple[int, int], moments: tuple[int, int]) -> None:
    """A tie goes to rows."""
    parameter = torch.nn.Parameter(torch.randn(shape))
    parameter.grad = torch.randn_like(parameter)
    optimizer = GrassAdamW([parameter], rank=2, **PAPER)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].shape == moments


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, dict(replacement=True, state_policy="bank")], ids=["plain", "bank, scaled"])
def test_fused_equals_unfused(options: dict, dtype: torch.dtype) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(16, 12).to(dtype))
        optimizer = GrassAdamW(
            [parameter], rank=4, update_interval=3, selection="uniform", fused=fused, **HYPER, **options
        )
        for gradient in uneven_gradients((16, 12), 8):
            parameter.grad = gradient.to(dtype)
            optimizer.step()
        results.append(parameter.detach())
    # fp32: another order of rounding. bf16: where that tips a rounding of the weight, one unit in its last place.
    rtol = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=1e-6)


def test_weights_do_not_disturb_each_other() -> None:
    """Several weights of other shapes, dtypes and ranks in one optimizer move as each does alone."""
    shapes = [(16, 12), (3, 40), (16, 12), (2, 2), (5, 1), (30, 20)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.float32]
    weights = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    gradients = gradients_for(weights, 8)
    together = [torch.nn.Parameter(w.clone()) for w in weights]
    run(GrassAdamW(together, **{**PAPER, **HYPER, "rank": 0.3, "update_interval": 3}), together, gradients)
    for i, weight in enumerate(weights):
        alone = torch.nn.Parameter(weight.clone())
        run(
            GrassAdamW([alone], **{**PAPER, **HYPER, "rank": 0.3, "update_interval": 3}),
            [alone],
            [[step[i]] for step in gradients],
        )
        assert torch.equal(together[i], alone), shapes[i]
