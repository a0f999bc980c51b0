"""What ``torch.optim.AdamW`` refuses, ``GrassAdamW`` refuses; and what it refuses beyond that, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_suite.cases import Build, both, parameters, set_gradients, take_steps, values

AS_TORCH: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1e-2}, r"Invalid lr=-0\.01"),
    "beta1": ({"betas": (1.0, 0.0)}, r"Invalid betas=\(1\.0, 0\.0\)"),
    "beta2": ({"betas": (0.0, 1.0)}, r"Invalid betas=\(0\.0, 1\.0\)"),
    "eps": ({"eps": -1e-8}, "Invalid eps=-1e-08"),
    "weight decay": ({"weight_decay": -1}, "Invalid weight_decay=-1"),
    "lr of two elements": ({"lr": torch.tensor([0.1, 0.2])}, "Invalid lr=.*one-element tensor"),
    "fused and foreach": ({"fused": True, "foreach": True}, "`fused` and `foreach` cannot be `True` together"),
}
"""Arguments that torch refuses too."""

DOCUMENTED: dict[str, tuple[dict[str, Any], str]] = {
    "amsgrad": ({"amsgrad": True}, "Invalid amsgrad=True: must be False: rows .* maximum"),
    "capturable": ({"capturable": True}, "Invalid capturable=True: must be False: .* on the host"),
    "differentiable": ({"differentiable": True}, "Invalid differentiable=True: must be False: .* in place"),
    "foreach": ({"foreach": "yes"}, "Invalid foreach='yes': must be one of None, False, True"),
}
"""Arguments that torch takes, at least by type, and ``GrassAdamW`` does not, with the reason it gives."""

REFUSED = AS_TORCH | DOCUMENTED


@both
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_values(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        build([{"params": parameters(), **options}])


@pytest.mark.parametrize(("options", "message"), AS_TORCH.values(), ids=AS_TORCH)
def test_torch_refuses_them_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        torch.optim.AdamW(parameters(), **options)


@both
def test_amsgrad_by_position(build: Build) -> None:
    """It stands where AdamW has it."""
    arguments = parameters(), 1e-3, (0.9, 0.999), 1e-8, 1e-2
    assert build(*arguments, False).param_groups[0]["amsgrad"] is False
    with pytest.raises(ValueError, match="Invalid amsgrad=True"):
        build(*arguments, True)


@both
def test_parameters(build: Build) -> None:
    p = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        build(p)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        build(["weight"])
    with pytest.raises(TypeError, match="param_group must be a dict"):
        build([{"params": [p]}, nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="empty parameter list"):
        build([])
    with pytest.raises(ValueError, match="non-leaf"):
        build([p * 2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        build([{"params": [p]}, {"params": [p]}])
    with pytest.raises(TypeError, match="sets"):
        build([{"params": {p}}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        build([p, p])


@both
def test_names_in_some_places_only(build: Build) -> None:
    """Given names are for all parameters, as in torch."""
    first, second = parameters()[:2]
    with pytest.raises(ValueError, match="with/without names"):
        build([("first", first), second])
    optimizer = build([("first", first)])
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [second]})
    assert optimizer.param_groups[0]["param_names"] == ["first"]


@both
def test_complex_parameters(build: Build) -> None:
    """A documented refusal: torch steps them as pairs of real numbers."""
    for shape in ((4, 4), (3,)):
        with pytest.raises(TypeError, match=r"real tensors, got torch\.complex64"):
            build([nn.Parameter(torch.ones(shape, dtype=torch.complex64))])


@both
def test_sparse_gradients(build: Build) -> None:
    """Refused before anything has changed, as by AdamW."""
    held, table = parameters(), nn.Embedding(6, 4, sparse=True)
    optimizer = build([*held, table.weight])
    before = values([*held, table.weight])
    set_gradients(held, 1)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(TypeError, match=r"dense gradients, got torch\.sparse_coo"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip([*held, table.weight], before, strict=True))
    assert not any(optimizer.state.values())


@both
def test_state_of_other_groups(build: Build) -> None:
    held = parameters()
    optimizer = build(held)
    take_steps(optimizer, held, [1])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        build([{"params": held[:2]}, {"params": held[2:]}]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        build(held[:2]).load_state_dict(optimizer.state_dict())
