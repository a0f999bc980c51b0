"""Several weights in one launch: each has the bits of a launch of its own."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from grass.kernels import (
    compact_adamw_,
    compact_adamw_8bit_,
    make_key,
    move_factors,
    move_rows_,
    reload_rows_,
    shrink_,
    together,
)

from .conftest import DEVICE, DTYPES, LAYOUTS, laid_out

SHAPES = [(7, 13), (7, 13), (19, 5), (7, 13), (64, 48), (64, 48)]  # three kinds, mixed


def matrices(dtype: torch.dtype, layout: str, shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    return [laid_out(torch.randn(shape).to(dtype), layout) for shape in shapes]


def columns(dtype: torch.dtype, layout: str, dim: int, r: int = 4) -> dict[str, list[Tensor]]:
    """Arguments of every weight by their names."""
    weights = matrices(dtype, layout)
    shapes = [(r, w.shape[1]) if dim == 0 else (w.shape[0], r) for w in weights]
    return {
        "weights": weights,
        "indices": [torch.randperm(w.shape[dim])[:r].to(DEVICE) for w in weights],
        "grads": matrices(torch.float32, layout, shapes),
        "exp_avgs": matrices(torch.float32, layout, shapes),
        "exp_avg_sqs": [m.square_() for m in matrices(torch.float32, layout, shapes)],
        "rows": matrices(torch.float32, layout, shapes),
        "ages": [torch.randint(1, 9, (r,)).float().to(DEVICE) for _ in weights],
    }


def copied(value: Any) -> Any:
    return {name: [t.clone() for t in column] for name, column in value.items()}


def step(of: dict[str, list[Tensor]], keys: list[int], dim: int, per_row: bool) -> dict[str, list[Tensor]]:
    """Every operation that takes several weights, one after another."""
    ages = of["ages"] if per_row else 3.0
    moments = of["exp_avgs"], of["exp_avg_sqs"]
    options = {"dim": dim, "rows": of["rows"], "keys": keys}
    numbers = {"step_size": 0.1, "shrink": 0.9}
    compact_adamw_(of["weights"], of["indices"], of["grads"], *moments, ages, moment_keys=keys, **numbers, **options)
    moves = move_factors(*moments, of["grads"], ages, dim=dim)
    factors, lengths, means = (list(column) for column in zip(*moves, strict=True))
    move_rows_(of["weights"], of["indices"], of["grads"], factors, means, **numbers, **options)
    if of["weights"][0].dtype != torch.float32:
        shrink_(of["weights"], 0.97, keys)
    reload_rows_(of["grads"], of["weights"], of["indices"], dim=dim)
    return {**of, "factors": factors, "lengths": lengths, "means": means}


def assert_as_one_after_another(run: Any, function: Any, every: Any, keys: list[int], *options: Any) -> None:
    """``function`` of all weights gives each the bits that it gives it alone, by the kernel and by its twin."""
    for implementation in ("triton", "torch"):
        together_ = run(implementation, function, copied(every), keys, *options)
        for i, key in enumerate(keys):
            own = {name: [column[i].clone()] for name, column in every.items()}
            for name, (tensor,) in run(implementation, function, own, [key], *options).items():
                assert torch.equal(together_[name][i], tensor), (implementation, name, i)


@pytest.mark.parametrize(("dim", "per_row"), [(0, True), (1, False)])
@pytest.mark.parametrize(("dtype", "layout"), list(itertools.product(DTYPES, LAYOUTS)), ids=str)
def test_equals_one_after_another(dtype, layout, per_row, dim, run) -> None:
    every, keys = columns(dtype, layout, dim), [make_key(i) for i in range(len(SHAPES))]
    assert_as_one_after_another(run, step, every, keys, dim, per_row)


@pytest.mark.parametrize("dim", [0, 1])
def test_codes_equal_one_after_another(dim, run) -> None:
    every, keys = columns(torch.bfloat16, "rows", dim), [make_key(i) for i in range(len(SHAPES))]
    blocks = [-(-m.numel() // 256) for m in every["exp_avgs"]]
    for name in ("exp_avgs", "exp_avg_sqs"):
        every[name] = [torch.randint(0, 255, m.shape, dtype=torch.uint8, device=DEVICE) for m in every[name]]
        every[f"{name}_scales"] = [torch.rand(count, device=DEVICE) for count in blocks]

    def coded(of: dict[str, list[Tensor]], keys: list[int]) -> dict[str, list[Tensor]]:
        names = "weights", "indices", "grads", "exp_avgs", "exp_avgs_scales", "exp_avg_sqs", "exp_avg_sqs_scales"
        options = {"dim": dim, "rows": of["rows"], "keys": keys, "moment_keys": keys, "step_size": 0.1}
        compact_adamw_8bit_(*(of[name] for name in names), of["ages"], **options)
        scales = of["exp_avgs_scales"], of["exp_avg_sqs_scales"]
        moves = move_factors(of["exp_avgs"], of["exp_avg_sqs"], of["grads"], 3, scales=scales, dim=dim)
        return {**of, "factors": [factors for factors, _, _ in moves]}

    assert_as_one_after_another(run, coded, every, keys)


def test_full_gradients_equal_one_after_another(run) -> None:
    """As in dense mode: rows are the weights' own."""
    every, keys = columns(torch.bfloat16, "rows", 0), [make_key(i) for i in range(len(SHAPES))]
    every["grads"] = matrices(torch.bfloat16, "rows")

    def dense(of: dict[str, list[Tensor]], keys: list[int]) -> dict[str, list[Tensor]]:
        tensors = (of[name] for name in ("weights", "indices", "grads", "exp_avgs", "exp_avg_sqs"))
        compact_adamw_(*tensors, 5, step_size=0.1, gather_grad=True, keys=keys)
        moves = move_factors(of["exp_avgs"], of["exp_avg_sqs"], of["grads"], 5, indices=of["indices"])
        factors, _, means = zip(*moves, strict=True)
        others = [torch.tensor([r for r in range(len(w)) if r not in i.tolist()]) for w, i in of_each(of)]
        others = [rows.to(DEVICE) for rows in others]
        move_rows_(of["weights"], others, of["grads"], factors, means, step_size=0.1, gather_grad=True, keys=keys)
        return of

    def of_each(of: dict[str, list[Tensor]]) -> Any:
        return zip(of["weights"], of["indices"], strict=True)

    assert_as_one_after_another(run, dense, every, keys)


def test_launches_of_limited_size(run, monkeypatch) -> None:
    """Partial sums of move_factors, and weights of a launch."""
    every, keys = columns(torch.float32, "rows", 0), list(range(len(SHAPES)))
    expected = run("triton", step, copied(every), keys, 0, True)
    monkeypatch.setattr(together, "MOST", 2)
    monkeypatch.setattr(importlib.import_module("grass.kernels.move_factors"), "AT_ONCE", 40)
    ours = run("triton", step, copied(every), keys, 0, True)
    assert all(torch.equal(a, b) for name in ours for a, b in zip(ours[name], expected[name], strict=True))


def test_unaligned(run) -> None:
    """Views of one buffer, not at multiples of 16 bytes."""
    whole = torch.randn(5 * 23 * 7, device=DEVICE)
    indices = [torch.tensor([3, 0], device=DEVICE)] * 5
    results = []
    for implementation in ("triton", "torch"):
        views = [part.view(23, 7) for part in whole.clone().split(161)]
        rows = [torch.zeros(2, 7, device=DEVICE) for _ in views]
        run(implementation, reload_rows_, rows, views, indices)
        results.append(rows)
    assert all(map(torch.equal, *results))


def test_unequally_many() -> None:
    with pytest.raises(ValueError, match="argument"):
        reload_rows_([torch.ones(2, 3)], [torch.ones(4, 3)] * 2, [torch.tensor([0, 1])] * 2)
