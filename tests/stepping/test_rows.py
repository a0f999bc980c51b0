"""The step of selected rows against an element-by-element reference and torch's AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from grass.selection.projector import Projector
from tests import reference
from tests.stepping.row_step import compact_adamw

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
SCALED = torch.tensor([0.5, 0.5, 2.0, 1.25])
# (dtype of weight and gradient, rtol, atol). The reference is float64. fp32: about ten rounded operations. bf16 and
# fp16 round the weight once for the decay and once for the update, each to half of 2^-8 and 2^-11 relative.
DTYPES = [
    pytest.param(torch.float64, 1e-12, 1e-14, id="fp64"),
    pytest.param(torch.float32, 2e-6, 1e-7, id="fp32"),
    pytest.param(torch.bfloat16, 8e-3, 1e-4, id="bf16"),
    pytest.param(torch.float16, 1e-3, 1e-5, id="fp16"),
]


@dataclass
class Problem:
    """Rows first; transposed into the columns of a matrix where ``dim=1``."""

    weight: Tensor
    projector: Projector
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    row_steps: Tensor

    @classmethod
    def make(cls, rows: list[int], rho: Tensor | None, dim: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
        state_dtype = torch.promote_types(dtype, torch.float32)
        indices = torch.tensor(rows)
        shape = (len(rows), 4)
        # Slots of one row hold the same history, as the optimizer guarantees.
        first = torch.tensor([rows.index(row) for row in rows])
        grad, avg, avg_sq = torch.randn(shape)[first], torch.randn(shape)[first] * 0.1, torch.rand(shape)[first] * 0.1
        steps = torch.arange(1, len(rows) + 1, dtype=state_dtype)[first]
        tensors = [t.to(dtype) for t in (torch.randn(6, 4), grad)] + [t.to(state_dtype) for t in (avg, avg_sq)]
        weight, grad, avg, avg_sq = (t.T.contiguous() if dim else t for t in tensors)
        return cls(weight, Projector(indices, rho, dim), grad, avg, avg_sq, steps)

    def step(self, row_steps: Tensor | int | None = None, **hyper: object) -> None:
        compact_adamw(
            self.weight,
            self.projector,
            self.grad,
            self.exp_avg,
            self.exp_avg_sq,
            self.row_steps if row_steps is None else row_steps,
            **{**HYPER, **hyper},
        )

    def expected(self, row_steps: list[int] | None = None, **hyper: object) -> tuple[Tensor, Tensor, Tensor]:
        dim = self.projector.dim
        weight, grad, avg, avg_sq = (t.T if dim else t for t in (self.weight, self.grad, self.exp_avg, self.exp_avg_sq))
        steps = self.row_steps.int().tolist() if row_steps is None else row_steps
        results = reference.compact_adamw(
            weight,
            self.projector.indices,
            self.projector.scale,
            grad,
            avg,
            avg_sq,
            steps,
            **{**HYPER, **hyper},
        )
        return tuple(t.T if dim else t for t in results)

    def check(self, expected: tuple[Tensor, Tensor, Tensor], rtol: float, atol: float) -> None:
        torch.testing.assert_close(self.weight, expected[0].to(self.weight.dtype), rtol=rtol, atol=atol)
        state_rtol = min(rtol, 2e-6)  # moments are at least fp32
        for actual, wanted in zip((self.exp_avg, self.exp_avg_sq), expected[1:], strict=True):
            torch.testing.assert_close(actual, wanted.to(actual.dtype), rtol=state_rtol, atol=min(atol, 1e-7))


PROBLEMS = {
    "distinct": ([0, 2, 3, 5], None),
    "distinct, scaled": ([0, 2, 3, 5], SCALED),
    "duplicates, scaled": ([1, 1, 4, 5], SCALED),
    "every row": ([0, 1, 2, 3, 4, 5], None),
    "one row": ([3], None),
}
OPTIONS = {
    "default": {},
    "decay all": dict(decay="all"),
    "no decay": dict(weight_decay=0.0),
    "maximize": dict(maximize=True),
    "scale": dict(scale=0.25),
    "scale, decay all, maximize": dict(scale=3.0, decay="all", maximize=True),
    "large eps": dict(eps=0.1),
    "beta1 zero": dict(betas=(0.0, 0.9)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize(("rows", "rho"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_against_reference(rows: list[int], rho: Tensor | None, dim: int, options: dict) -> None:
    problem = Problem.make(rows, rho, dim)
    expected = problem.expected(**options)
    problem.step(**options)
    problem.check(expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), DTYPES)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("case", ["distinct", "duplicates, scaled"])
def test_dtypes(case: str, dim: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    problem = Problem.make(*PROBLEMS[case], dim=dim, dtype=dtype)
    expected = problem.expected()
    problem.step()
    problem.check(expected, rtol, atol)


@pytest.mark.parametrize("decay", ["selected", "all"])
def test_unselected_rows(decay: str) -> None:
    """They stay as they are to the bit, or decay and nothing more."""
    problem = Problem.make([0, 2, 3], None, dtype=torch.float32)
    before = problem.weight.clone()
    problem.step(decay=decay)
    rest = [1, 4, 5]
    if decay == "selected":
        assert torch.equal(problem.weight[rest], before[rest])
    else:
        shrunk = before[rest] * (1 - HYPER["lr"] * HYPER["weight_decay"])
        torch.testing.assert_close(problem.weight[rest], shrunk, rtol=2e-7, atol=0)  # one fp32 rounding
    assert not torch.isclose(problem.weight[[0, 2, 3]], before[[0, 2, 3]], rtol=1e-4).all(dim=1).any()


def test_duplicates_decay_once_and_move_twice() -> None:
    """Two slots of one row with rho = 1 move it twice as far as one slot does."""
    double = Problem.make([1, 1], torch.ones(2))
    single = Problem.make([1], None)
    single.weight, start = double.weight.clone(), double.weight.clone()
    single.grad, single.exp_avg, single.exp_avg_sq = (
        t[:1].clone() for t in (double.grad, double.exp_avg, double.exp_avg_sq)
    )
    double.step()
    single.step()
    decayed = start[1] * (1 - HYPER["lr"] * HYPER["weight_decay"])
    torch.testing.assert_close(double.weight[1] - decayed, 2 * (single.weight[1] - decayed), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_integer_row_steps(steps: int) -> None:
    problem = Problem.make([0, 2, 3, 5], None)
    expected = problem.expected([steps] * 4)
    problem.step(steps)
    problem.check(expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["fp32", "int64"])
def test_row_steps_are_only_read(dtype: torch.dtype) -> None:
    problem = Problem.make([0, 2, 3, 5], None)
    steps = torch.tensor([1, 2, 30, 400], dtype=dtype)
    expected = problem.expected([1, 2, 30, 400])
    problem.step(steps)
    # The correction may be computed in fp32, but not as 1 - beta**s, which loses digits to cancellation.
    problem.check(expected, rtol=1e-6, atol=1e-8)
    assert steps.tolist() == [1, 2, 30, 400]


def test_rows_with_equal_history_and_other_step_counts_differ() -> None:
    problem = Problem.make([0, 1], None)
    for tensor in (problem.weight, problem.grad, problem.exp_avg, problem.exp_avg_sq):
        tensor[1] = tensor[0]
    problem.step(torch.tensor([1.0, 50.0]))
    assert not torch.isclose(problem.weight[0], problem.weight[1]).any()


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_tensor_lr(lr_dtype: torch.dtype) -> None:
    options = dict(decay="all", scale=0.5)
    problem = Problem.make([1, 1, 4, 5], SCALED)
    expected = problem.expected(**options)
    lr = torch.tensor(HYPER["lr"], dtype=lr_dtype)
    problem.step(lr=lr, **options)
    problem.check(expected, rtol=1e-6, atol=1e-8)  # 0.01 itself is rounded to fp32
    assert lr == torch.tensor(HYPER["lr"], dtype=lr_dtype)


@pytest.mark.parametrize("rho", [None, SCALED], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_leaves_its_inputs_alone(rho: Tensor | None, maximize: bool) -> None:
    problem = Problem.make([0, 2, 3, 5], rho)
    grad, indices = problem.grad.clone(), problem.projector.indices.clone()
    scale = None if rho is None else rho.clone()
    pointers = [t.data_ptr() for t in (problem.weight, problem.exp_avg, problem.exp_avg_sq)]
    problem.step(maximize=maximize)
    assert torch.equal(problem.grad, grad)
    assert torch.equal(problem.projector.indices, indices)
    assert rho is None or torch.equal(problem.projector.scale, scale)
    assert pointers == [t.data_ptr() for t in (problem.weight, problem.exp_avg, problem.exp_avg_sq)]


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_non_contiguous_weight(dim: int) -> None:
    problem = Problem.make([0, 2, 3, 5], SCALED, dim)
    expected = problem.expected(decay="all")
    problem.weight = torch.zeros(*problem.weight.shape, 2, dtype=torch.float64)[..., 0].copy_(problem.weight)
    problem.step(decay="all")
    problem.check(expected, rtol=1e-12, atol=1e-14)


def test_ten_steps_equal_torch_adamw_on_the_rows() -> None:
    """The compact matrix is an ordinary AdamW problem of its own."""
    weight, rows = torch.randn(6, 4, dtype=torch.float64), torch.tensor([1, 4])
    theirs = torch.nn.Parameter(weight[rows].clone())
    adamw = torch.optim.AdamW([theirs], **HYPER)
    exp_avg, exp_avg_sq = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for step, gradient in enumerate(reference.uneven_gradients((2, 4), 10), start=1):
        theirs.grad = gradient.clone()
        adamw.step()
        compact_adamw(weight, Projector(rows, None, 0), gradient, exp_avg, exp_avg_sq, step, **HYPER)
    torch.testing.assert_close(weight[rows], theirs.data, rtol=1e-12, atol=1e-14)


def test_weight_that_requires_grad() -> None:
    """An ``nn.Parameter`` is updated without entering the graph."""
    problem = Problem.make([0, 2], None)
    expected = problem.expected()
    problem.weight = torch.nn.Parameter(problem.weight)
    with torch.no_grad():
        problem.step()
    torch.testing.assert_close(problem.weight.data, expected[0], rtol=1e-12, atol=1e-14)
    assert problem.weight.grad_fn is None
