"""Small half-precision parameters at full rank have a float32 master without being asked."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.offload.options import Offload
from grass.state.master import SMALL, keeps_master

HALF = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """A norm, a gate, a weight that is selected from, and a channels-last kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.gate = nn.LayerNorm(12), nn.Linear(12, 10), nn.Linear(10, 4, bias=False)
        self.kernel = nn.Parameter(torch.randn(3, 2, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.first(self.norm(x)).tanh()) + self.kernel.square().mean()


def built(dtype: torch.dtype = torch.bfloat16, *, compact: bool = False, **options: Any) -> tuple[Net, GrassAdamW]:
    model = Net().to(dtype)
    if compact:
        grass.compact(model, rank=4, targets=["first"])
        return model, GrassAdamW(model, **options)
    return model, GrassAdamW(grass.param_groups(model, rank=4, targets=["first"]), **options)


def gradients(model: Net, step: int) -> None:
    """Gradients of a batch, in the model's precision."""
    model.zero_grad()
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).to(model.gate.weight.dtype)
    (model(x).float() - 1).square().mean().backward()


def train(model: Net, optimizer: GrassAdamW, steps: range) -> None:
    for step in steps:
        gradients(model, step)
        optimizer.step()


def small(model: Net) -> dict[str, nn.Parameter]:
    """The parameters that are to have a master."""
    return {n: p for n, p in model.named_parameters() if not n.startswith("first") or n.endswith("bias")}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": True}, {"stochastic_rounding": True}], ids=str)
def test_equals_torch_on_float32_copies(dtype: torch.dtype, compact: bool, options: dict[str, Any]) -> None:
    model, optimizer = built(dtype, compact=compact, lr=1e-3, **options)
    copies = {n: nn.Parameter(p.detach().float()) for n, p in small(model).items()}
    reference = torch.optim.AdamW(copies.values(), lr=1e-3)
    for step in range(6):
        gradients(model, step)
        for name, p in small(model).items():
            assert p.grad is not None
            copies[name].grad = p.grad.float()
        optimizer.step()
        reference.step()
        for name, p in small(model).items():
            master = optimizer.state[p]["master"]
            torch.testing.assert_close(master, copies[name].detach(), rtol=3e-7, atol=1e-8)  # fused or not
            assert torch.equal(p, master.to(dtype))
    assert all("master" not in optimizer.state[p] for n, p in model.named_parameters() if n not in small(model))


def test_steps_below_the_precision_add_up() -> None:
    """AdamW moves a norm by its learning rate, 1e-3, in each step: an eighth of bfloat16's spacing at 1."""
    norm = nn.Parameter(torch.ones(1152, dtype=torch.bfloat16))
    optimizer = GrassAdamW([norm], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        norm.grad = torch.full_like(norm, -0.01)
        optimizer.step()
    assert torch.equal(norm, torch.full_like(norm, 1.1))


def test_which_have_one() -> None:
    half = {"dtype": torch.bfloat16, "device": "meta"}
    assert keeps_master(torch.empty(SMALL + 1, **half))
    assert keeps_master(torch.empty(SMALL // 8, 8, **half))
    assert not keeps_master(torch.empty(SMALL // 8 + 1, 8, **half))
    assert not keeps_master(torch.empty(8, device="meta"))


@pytest.mark.parametrize("offload", [None, Offload(), Offload(fraction=1.0)], ids=["resident", "host", "visits"])
@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
def test_resumes_bit_for_bit(compact: bool, offload: Offload | None) -> None:
    model, optimizer = built(compact=compact, lr=1e-3, offload=offload)
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, resumed = built(compact=compact, lr=1e-2, offload=offload)
    train(other, resumed, range(2))
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(5, 30))
    ours, theirs = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(state["master"], theirs[i]["master"]) for i, state in ours.items() if "master" in state)


@pytest.mark.parametrize("options", [{}, {"fraction": 0.5}, {"fraction": 1.0}], ids=str)
def test_offload_gives_the_same_bits(options: dict[str, Any]) -> None:
    results = []
    for offload in (None, Offload(**options)):
        model, optimizer = built(lr=1e-3, offload=offload)
        train(model, optimizer, range(12))
        optimizer.state_dict()  # waits
        results.append((list(model.parameters()), [optimizer.state[p].get("master") for p in model.parameters()]))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_in_backward_gives_the_same_bits() -> None:
    models = []
    for in_backward in (False, True):
        model, optimizer = built(lr=1e-3)
        if in_backward:
            grass.step_in_backward(optimizer)
        train(model, optimizer, range(6))
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_a_change_from_outside_wins() -> None:
    """Elements that were changed have a new master; the others keep theirs."""
    model, optimizer = built(lr=1e-3)
    train(model, optimizer, range(5))
    p, state = model.norm.weight, optimizer.state[model.norm.weight]
    before = state["master"].clone()
    p.data[:3] = 5.0
    optimizer.param_groups[-1]["lr"] = optimizer.param_groups[0]["lr"] = 0.0
    gradients(model, 5)
    optimizer.step()
    assert torch.equal(state["master"], torch.cat([torch.full((3,), 5.0), before[3:]]))
    assert torch.equal(p, state["master"].bfloat16())


def test_state_without_masters_is_taken() -> None:
    """That of torch, and of checkpoints written before there were masters."""
    norm = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    norm.grad = torch.ones_like(norm)
    older = torch.optim.AdamW([norm])
    older.step()
    optimizer = GrassAdamW([norm])
    optimizer.load_state_dict(older.state_dict())
    optimizer.step()
    assert {k: v.dtype for k, v in optimizer.state[norm].items()} == dict.fromkeys(
        ["step", "exp_avg", "exp_avg_sq", "master"], torch.float32
    )
    assert optimizer.state[norm]["step"] == 2


def test_a_model_that_becomes_float32_drops_them() -> None:
    model, optimizer = built(lr=1e-3)
    train(model, optimizer, range(3))
    model.float()
    train(model, optimizer, range(3, 5))
    assert all("master" not in state for state in optimizer.state.values())


def test_copies_do_not_share_them(tmp_path: Path) -> None:
    model, optimizer = built(lr=1e-3)
    train(model, optimizer, range(3))
    other, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other, twin)):
        train(m, o, range(3, 20))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
