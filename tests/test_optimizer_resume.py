"""Save, stop, resume: bit-identical to never having stopped."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Parameter

from grass import PAPER, GrassAdamW
from grass.memory import state_bytes
from tests.reference import assert_same_state, gradients_for, run

POLICIES = ["reset", "keep", "bank"]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
OPTIONS = dict(PAPER, lr=1e-2, rank=3, update_interval=4, warmup_after_refresh=3, weight_decay=0.1)
SHAPES = [(8, 10), (12, 5), (6,), (4, 3, 2, 2)]


def fresh(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def through_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(saved: dict, weights: list[Tensor], **options: object) -> tuple[list[Parameter], GrassAdamW]:
    """What a new process does: build, then load."""
    parameters = [Parameter(w.detach().clone()) for w in weights]
    optimizer = GrassAdamW(parameters, **options)
    optimizer.load_state_dict(saved)
    return parameters, optimizer


@pytest.mark.parametrize("stop", [1, 3, 4, 6, 8], ids=lambda stop: f"after {stop}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("policy", POLICIES)
def test_through_torch_save(policy: str, replacement: bool, dtype: torch.dtype, stop: int) -> None:
    """Stopped right before, at and after a refresh; what follows crosses at least one more."""
    options = dict(OPTIONS, state_policy=policy, replacement=replacement, selection="multinomial_norm")
    ours = fresh(dtype)
    gradients = gradients_for(ours, 14)
    optimizer = GrassAdamW(ours, **options)
    run(optimizer, ours, gradients[:stop])
    saved = through_file(optimizer.state_dict())
    theirs, other = resumed(saved, ours, **options)
    assert_same_state(other.state_dict(), optimizer.state_dict())
    run(optimizer, ours, gradients[stop:])
    run(other, theirs, gradients[stop:])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert_same_state(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_more_rows_than_half_precision_can_count(policy: str, dtype: torch.dtype) -> None:
    """In bf16 row 70,001 is 70,144, and step 257 is 256: a state cast to the weight's dtype would train another row."""
    rows, options = 70_005, dict(lr=1e-2, rank=2, dim=0, selection="top_r", update_interval=4, state_policy=policy)
    gradients = []
    for step in range(12):
        gradient = torch.zeros(rows, 2)
        gradient[[70_001 if step < 6 else 12_345, 70_003]] = torch.tensor([[3.0, 1.7], [0.3, 2.1]]) / (step + 1)
        gradients.append([gradient])
    ours = [Parameter(torch.ones(rows, 2, dtype=dtype))]
    optimizer = GrassAdamW(ours, **options)
    run(optimizer, ours, gradients[:3])
    theirs, other = resumed(through_file(optimizer.state_dict()), ours, **options)
    assert other.state[theirs[0]]["indices"].tolist() == [70_001, 70_003]
    assert other.state[theirs[0]]["exp_avg"].dtype == torch.float32
    run(optimizer, ours, gradients[3:])
    run(other, theirs, gradients[3:])
    assert torch.equal(ours[0], theirs[0])
    assert_same_state(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_many_steps_are_counted_exactly_in_bf16(policy: str) -> None:
    """300 is 300 after loading; in bf16 it would not be distinguishable from 301."""
    options = dict(OPTIONS, state_policy=policy, update_interval=1000)
    ours = [Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    optimizer = GrassAdamW(ours, **options)
    run(optimizer, ours, [[torch.ones(4, 4)]] * 301)
    theirs, other = resumed(through_file(optimizer.state_dict()), ours, **options)
    assert other.state[theirs[0]]["row_steps"].tolist() == [301] * 3
    assert other.state[theirs[0]]["step"] == 301


@pytest.mark.parametrize("bank_dtype", ["float32", "bfloat16"])
def test_bank_dtype_survives(bank_dtype: str) -> None:
    options = dict(OPTIONS, state_policy="bank", bank_dtype=bank_dtype)
    ours = fresh(torch.float32)
    gradients = gradients_for(ours, 12)
    optimizer = GrassAdamW(ours, **options)
    run(optimizer, ours, gradients[:6])
    theirs, other = resumed(through_file(optimizer.state_dict()), ours, **options)
    assert other.state[theirs[0]]["bank_exp_avg"].dtype == getattr(torch, bank_dtype)
    assert other.state[theirs[0]]["bank_exp_avg"].device.type == "cpu"
    assert state_bytes(other) == state_bytes(optimizer)
    run(optimizer, ours, gradients[6:])
    run(other, theirs, gradients[6:])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_state_dict_may_be_loaded_twice() -> None:
    """Training on after loading writes to copies, not into the dict."""
    ours = fresh(torch.float32)
    gradients = gradients_for(ours, 10)
    optimizer = GrassAdamW(ours, **{**OPTIONS, "state_policy": "bank"})
    run(optimizer, ours, gradients[:5])
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in ours]
    first_parameters, first = resumed(saved, weights, **{**OPTIONS, "state_policy": "bank"})
    run(first, first_parameters, gradients[5:])
    second_parameters, second = resumed(saved, weights, **{**OPTIONS, "state_policy": "bank"})
    run(second, second_parameters, gradients[5:])
    # Vectors have torch's own state, which its loading shares with the dict.
    assert all(torch.equal(a, b) for a, b in zip(first_parameters, second_parameters, strict=True) if a.ndim > 1)


def test_state_is_tensors_and_plain_scalars() -> None:
    ours = fresh(torch.bfloat16)
    optimizer = GrassAdamW(ours, **{**OPTIONS, "state_policy": "bank", "selection": "uniform", "replacement": True})
    run(optimizer, ours, gradients_for(ours, 5))
    keys = {"step", "refresh_step", "refreshes", "dim", "indices", "row_scale", "exp_avg", "exp_avg_sq", "row_steps"}
    keys |= {"bank_exp_avg", "bank_exp_avg_sq", "bank_steps"}
    for index, state in optimizer.state_dict()["state"].items():
        assert set(state) == (keys if len(SHAPES[index]) > 1 else {"step", "exp_avg", "exp_avg_sq", "master"})
        assert all(isinstance(value, (Tensor, int, float)) for value in state.values())


def test_state_follows_the_group_options_it_was_saved_with() -> None:
    """As for every torch optimizer the loaded groups win over those of the constructor."""
    ours = fresh(torch.float32)
    optimizer = GrassAdamW(ours, **{**OPTIONS, "selection": "uniform", "seed": 3})
    gradients = gradients_for(ours, 10)
    run(optimizer, ours, gradients[:2])
    theirs, other = resumed(through_file(optimizer.state_dict()), ours, lr=0.5, rank=1)
    run(optimizer, ours, gradients[2:])
    run(other, theirs, gradients[2:])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Network(nn.Module):
    """Two weights and two biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(10, 8, dtype=dtype), nn.Linear(8, 6, dtype=dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("policy", POLICIES)
def test_through_distributed_checkpoint(tmp_path, policy: str, replacement: bool, dtype: torch.dtype) -> None:
    """It builds a fresh optimizer's state by a step with lr = 0 and zero gradients, then loads into it in place."""
    options = dict(OPTIONS, state_policy=policy, replacement=replacement, selection="multinomial_norm")

    def build() -> tuple[Network, GrassAdamW]:
        model = Network(dtype)
        return model, GrassAdamW(model.parameters(), **options)

    model, optimizer = build()
    gradients = gradients_for(list(model.parameters()), 14)
    run(optimizer, list(model.parameters()), gradients[:6])
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    other_model, other = build()
    weights, states = get_state_dict(other_model, other)
    loaded = {"model": weights, "optimizer": states}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_state_dict(other_model, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_same_state(other.state_dict(), optimizer.state_dict())
    run(optimizer, list(model.parameters()), gradients[6:])
    run(other, list(other_model.parameters()), gradients[6:])
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fake_step_counts_nothing(policy: str, lr: float | Tensor) -> None:
    ours, theirs = fresh(torch.float32), fresh(torch.float32)
    options = dict(OPTIONS, state_policy=policy, selection="multinomial_norm")
    gradients = gradients_for(ours, 10)
    optimizer, control = GrassAdamW(ours, **options), GrassAdamW(theirs, **options)
    for group in optimizer.param_groups:
        group["lr"] = lr
    run(optimizer, ours, [[torch.zeros_like(p) for p in ours]])
    assert optimizer.state[ours[0]]["refreshes"] == 0
    assert optimizer.state[ours[0]]["step"] == 0
    assert optimizer.state[ours[0]]["exp_avg"].shape == (3, 10)
    for group in optimizer.param_groups:
        group["lr"] = options["lr"]
    projected = [i for i, p in enumerate(ours) if p.ndim > 1]  # torch's own AdamW does count the step
    run(optimizer, ours, gradients)
    run(control, theirs, gradients)
    assert all(torch.equal(ours[i], theirs[i]) for i in projected)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_from_channels_last_to_contiguous(dim: int) -> None:
    options = {**OPTIONS, "rank": 3, "dim": dim, "update_interval": 100}
    ours = [Parameter(torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last))]
    gradients = gradients_for(ours, 6)
    optimizer = GrassAdamW(ours, **options)
    run(optimizer, ours, gradients[:3])
    theirs, other = resumed(through_file(optimizer.state_dict()), [ours[0].contiguous()], **options)
    run(optimizer, ours, gradients[3:])
    run(other, theirs, gradients[3:])
    torch.testing.assert_close(theirs[0], ours[0].contiguous(), rtol=1e-5, atol=1e-6)  # fp32, three steps


@pytest.mark.parametrize("rank", [None, 3], ids=["into AdamW", "into Grass"])
def test_state_of_another_mode_is_refused(rank: int | None) -> None:
    weight = Parameter(torch.randn(6, 4))
    weight.grad = torch.randn_like(weight)
    saved = GrassAdamW([weight], rank=3 if rank is None else None)
    saved.step()
    with pytest.raises(ValueError, match="does not carry over"):
        GrassAdamW([weight], rank=rank).load_state_dict(
            {**saved.state_dict(), "param_groups": GrassAdamW([weight], rank=rank).state_dict()["param_groups"]}
        )
