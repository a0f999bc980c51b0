"""Code that wants row-major weights takes those of converted models. Column-major checkpoints load."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from tests.compact_mode.networks import DIMS, Network, batches, converted, loss_of, train


@pytest.mark.parametrize("dim", DIMS)
def test_parameters_as_a_vector(dim: int) -> None:
    """Parameters that come from a vector are views of it, which train on."""
    model, optimizer = converted(dim=dim, explore=2)
    train(model, optimizer, batches(2))
    twin = copy.deepcopy((model, optimizer))
    vector = parameters_to_vector(model.parameters())
    assert torch.equal(vector, torch.cat([p.detach().view(-1) for p in model.parameters()]))
    vector_to_parameters(vector.detach().clone(), model.parameters())
    for each in ((model, optimizer), twin):
        train(*each, batches(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin[0].parameters(), strict=True))


def test_pruning() -> None:
    """Before the conversion; afterwards the forward says so, as for other parametrizations."""
    model, _ = converted()
    prune.l1_unstructured(model.up, "weight", 0.5)
    with pytest.raises(RuntimeError, match=r"'up' is no longer its parameter: apply .* before grass.compact"):
        model(torch.zeros(2, 12))


@pytest.mark.parametrize("dim", DIMS)
def test_safetensors(dim: int, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = converted(dim=dim)
    train(model, optimizer, batches(3))
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    safetensors.save_model(model, str(tmp_path / "whole.safetensors"))
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    for other in (Network(seed=1), converted(dim=dim, seed=2)[0]):
        other.load_state_dict(saved)
        assert torch.equal(loss_of(other, batches(1)[0]), loss_of(model, batches(1)[0]))


def as_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_column_major_checkpoints(moment_dtype: str) -> None:
    """As earlier builds saved them: a run goes on alike, bit for bit."""
    ends = []
    for change in (lambda tensor: tensor, as_columns):
        model, optimizer = converted(explore=2, moment_dtype=moment_dtype)
        train(model, optimizer, batches(3))
        weights = {name: change(value) for name, value in model.state_dict().items()}
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state.update({key: change(v) for key, v in state.items() if isinstance(v, torch.Tensor)})
        other, theirs = converted(explore=2, moment_dtype=moment_dtype, seed=4)
        other.load_state_dict(weights)
        theirs.load_state_dict(saved)
        train(other, theirs, batches(9)[3:])
        assert all(p.is_contiguous() for p in other.parameters())
        assert all(s["exp_avg"].is_contiguous() for s in theirs.state.values() if "indices" in s)
        ends.append([p.detach() for p in other.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
