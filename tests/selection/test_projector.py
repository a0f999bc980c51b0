"""The projector against the projection matrix it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grass.selection.projector import Projector
from tests.reference import dense_projection

# (dtype, rtol, atol); the reference is float64. One product and, for duplicates, up to four additions are rounded:
# each to 2^-53, 2^-24 and 2^-9 relative, doubled for headroom. atol allows for terms that cancel.
TOLERANCES = [
    pytest.param(torch.float64, 1e-14, 1e-14, id="fp64"),
    pytest.param(torch.float32, 1e-6, 1e-6, id="fp32"),
    pytest.param(torch.bfloat16, 2e-2, 4e-2, id="bf16"),
]
INDICES = {"distinct": [0, 2, 3], "duplicates": [1, 1, 1, 4], "one": [2], "every row": [0, 1, 2, 3, 4]}


def example(indices: list[int], scaled: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    rows = torch.tensor(indices)
    rho = torch.rand(len(rows)) + 0.5 if scaled else None
    return rows, rho, dense_projection(rows, rho, 5)


def matrix(dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((5, 3) if dim == 0 else (3, 5), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TOLERANCES)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES.keys())
class TestAgainstDenseMatrices:
    def test_project(self, indices, scaled, dim, dtype, rtol, atol) -> None:
        rows, rho, p = example(indices, scaled)
        full = matrix(dim, dtype)
        expected = p.T @ full.double() if dim == 0 else full.double() @ p
        actual = Projector(rows, rho, dim).project(full)
        assert actual.dtype == (torch.promote_types(dtype, torch.float32) if scaled else dtype)
        torch.testing.assert_close(actual.to(dtype), expected.to(dtype), rtol=rtol, atol=atol)

    def test_lift(self, indices, scaled, dim, dtype, rtol, atol) -> None:
        rows, rho, p = example(indices, scaled)
        compact = matrix(dim, dtype).index_select(dim, rows)
        expected = p @ compact.double() if dim == 0 else compact.double() @ p.T
        actual = Projector(rows, rho, dim).lift(compact, 5)
        torch.testing.assert_close(actual, expected.to(dtype), rtol=rtol, atol=atol)

    @pytest.mark.parametrize("alpha", [1.0, -0.3])
    def test_add_to(self, indices, scaled, dim, dtype, rtol, atol, alpha) -> None:
        rows, rho, p = example(indices, scaled)
        weight = matrix(dim, dtype)
        compact = matrix(dim, dtype).index_select(dim, rows)
        lifted = p @ compact.double() if dim == 0 else compact.double() @ p.T
        expected = (weight.double() + alpha * lifted).to(dtype)
        kept, compact_before = weight, compact.clone()
        assert Projector(rows, rho, dim).add_to_(weight, compact, alpha) is kept
        torch.testing.assert_close(weight, expected, rtol=rtol, atol=atol)
        assert torch.equal(compact, compact_before)


def layouts(full: Tensor) -> dict[str, Tensor]:
    """The same matrix with other strides."""
    spaced = torch.zeros(full.shape[0], 2 * full.shape[1])[:, ::2]
    return {"transposed": full.T.contiguous().T, "spaced": spaced.copy_(full), "expanded": full[:1].expand_as(full)}


@pytest.mark.parametrize("layout", ["transposed", "spaced", "expanded"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_project_ignores_strides(dim: int, layout: str) -> None:
    projector = Projector(torch.tensor([0, 2, 2]), torch.tensor([1.0, 0.5, 2.0]), dim)
    full = layouts(torch.randn(4, 3))[layout]
    assert torch.equal(projector.project(full), projector.project(full.contiguous()))


@pytest.mark.parametrize("layout", ["transposed", "spaced"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_add_to_ignores_strides(dim: int, layout: str) -> None:
    """The sum must land in the storage of the weight, not in a contiguous copy of it."""
    projector = Projector(torch.tensor([0, 2, 2]), torch.tensor([1.0, 0.5, 2.0]), dim)
    weight = layouts(torch.randn(4, 3))[layout]
    expected, compact = weight.clone().contiguous(), torch.randn((3, 3) if dim == 0 else (4, 3))
    projector.add_to_(weight, compact.T.contiguous().T, -0.5)
    projector.add_to_(expected, compact, -0.5)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)  # fp32, summed in another order at most


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, int, int]:
    size, other = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    indices = sorted(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12)))
    scaled = draw(st.booleans())
    rho = torch.tensor(draw(st.lists(st.floats(0.125, 8, width=32), min_size=len(indices), max_size=len(indices))))
    return torch.tensor(indices), rho if scaled else None, size, other


@given(problem=problems(), dim=st.sampled_from([0, 1]))
def test_lift_is_the_adjoint_of_project(problem: tuple[Tensor, Tensor | None, int, int], dim: int) -> None:
    """``<P^T G, D> = <G, P D>`` for all G and D; with it one of the two determines the other."""
    indices, rho, size, other = problem
    generator = torch.Generator().manual_seed(size + 13 * other)
    full = torch.randn((size, other) if dim == 0 else (other, size), generator=generator, dtype=torch.float64)
    projector = Projector(indices, rho, dim)
    projected = projector.project(full)
    compact = torch.randn(projected.shape, generator=generator, dtype=torch.float64)
    lifted = projector.lift(compact, size)
    assert lifted.shape == full.shape
    left, right = (projected * compact).sum(), (full * lifted).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-10)  # fp64 sums of a hundred terms up to about 50


@given(problem=problems(), dim=st.sampled_from([0, 1]))
def test_lift_leaves_other_rows_zero(problem: tuple[Tensor, Tensor | None, int, int], dim: int) -> None:
    indices, rho, size, other = problem
    compact = torch.ones((len(indices), other) if dim == 0 else (other, len(indices)))
    lifted = Projector(indices, rho, dim).lift(compact, size)
    rows = lifted if dim == 0 else lifted.T
    assert set(rows.abs().sum(1).nonzero().flatten().tolist()) == set(indices.tolist())


def test_invalid_dim() -> None:
    with pytest.raises(ValueError, match=r"2.*0.*1"):
        Projector(torch.tensor([0]), None, 2)


def test_a_single_row_of_any_stride() -> None:
    """As one column of a column-major matrix is when transposed."""
    row = torch.arange(8.0).view(1, 8).as_strided((1, 8), (1, 1))
    assert torch.equal(Projector(torch.tensor([2])).scatter_(torch.zeros(4, 8), row)[2], torch.arange(8.0))
