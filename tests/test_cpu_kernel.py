"""The one-pass CPU kernel against its torch twin."""

import shutil

import pytest
import torch

import grass
from grass import cpu_kernel
from grass.functional import StepCoefficients, project_and_step_
from grass.projector import Projector

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8}
# float32: both round each operation once, in another order; the compiler may fuse multiply and add
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


@needs_compiler
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("per_row", [False, True], ids=["one-age", "row-ages"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (64, 48), (37, 131)], ids=str)
def test_dense_step(shape: tuple[int, int], dim: int, per_row: bool, maximize: bool) -> None:
    rank = max(1, shape[dim] // 3)
    projector = Projector(torch.randperm(shape[dim])[:rank].sort().values, None, dim)
    ages = torch.randint(1, 50, (rank,)).float() if per_row else 7
    coefficients = StepCoefficients.at(ages, lr=1e-2, betas=HYPER["betas"], weight_decay=0.1)
    numbers = {"row_steps": ages, "step_size": 1e-2, "shrink": 1 - 1e-2 * 0.1}
    weight, grad = torch.randn(shape), torch.randn(shape)
    exp_avg, exp_avg_sq = projector.gather(torch.randn(shape)), projector.gather(torch.rand(shape))
    ours = [t.clone() for t in (weight, exp_avg, exp_avg_sq)]
    assert cpu_kernel.can_step(weight, grad, exp_avg, projector)
    cpu_kernel.step_(ours[0], projector, grad, *ours[1:], **numbers, **HYPER, maximize=maximize)
    project_and_step_(weight, projector, grad, exp_avg, exp_avg_sq, coefficients, **HYPER, maximize=maximize)
    for our, twin in zip(ours, (weight, exp_avg, exp_avg_sq), strict=True):
        torch.testing.assert_close(our, twin, **CLOSE)


@needs_compiler
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("decay", ["selected", "all"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_compact_training(dim: int, decay: str, policy: str) -> None:
    def train(fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 7))
        grass.compact(model, rank=0.4, dim=dim)
        options = {"update_interval": 3, "selection": "uniform", "state_policy": policy, "decay": decay}
        optimizer = grass.GrassAdamW(model, lr=1e-2, weight_decay=0.1, fused=fused, **options)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(5, 13)).square().sum().backward()
            optimizer.step()
            for layer in (model[0], model[2]):
                assert torch.equal(layer.projector().gather(layer.matrix()), layer.active)
        return list(model.state_dict().values())

    for ours, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # twelve steps of rounding differences


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.randn(4, 4, dtype=torch.bfloat16), None),
        (torch.randn(4, 4).t(), None),
        (torch.randn(4, 4), torch.ones(2)),
        (torch.empty(4, 4, device="meta"), None),
    ],
    ids=["bf16", "transposed", "scaled", "meta"],
)
def test_declines_what_it_does_not_know(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    projector = Projector(torch.tensor([0, 2]), scale, 0)
    assert not cpu_kernel.can_step(weight, weight, torch.zeros(2, 4), projector)


def test_says_that_there_is_no_compiler(monkeypatch) -> None:
    monkeypatch.setattr(cpu_kernel.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="C\\+\\+ compiler"):
        cpu_kernel.library.__wrapped__()


@needs_compiler
def test_says_why_the_compiler_failed(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernel, "FLAGS", ("-no-such-flag",))
    with pytest.raises(RuntimeError, match="no-such-flag"):
        cpu_kernel.library.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))
