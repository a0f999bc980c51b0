"""Compact mode on experts: gradients, training, saving, and what stands around it."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.layer import CompactLayer
from tests.experts.models import EXPERTS, INNER, OUTER, Experts, Separate, batch, train
from tests.offload.training import same


def converted(dim: int = 1, explore: Any = 2, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=explore, dim=dim)
    return model, GrassAdamW(model, **{"lr": 1e-2, "update_interval": 3, **options})


def rows_of(model: Any) -> list[ExpertRows]:
    return [layer for layer in model.modules() if isinstance(layer, ExpertRows)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_gradient_is_that_of_the_chosen_rows(dim: int, step: int) -> None:
    model, _ = converted(dim)
    plain = copy.deepcopy(model)
    grass.expand(plain)
    x, ends = batch(step)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for network, given in zip((model, plain), inputs, strict=True):
        network(given, ends).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)
    for layer, name in zip(rows_of(model), ("up", "down"), strict=True):
        whole = getattr(plain, name).grad
        rows = (whole if layer.by_rows else whole.transpose(1, 2)).flatten(0, 1)[layer.chosen].clone()
        rows[layer.rank :] *= layer.gradient_scale
        found = layer.active.grad if dim == 0 else layer.active.grad.t()
        torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_layout(dim: int, weights: str | None) -> None:
    """That of plain experts, whether the rows that are selected lie in one piece or not."""
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=2, dim=dim, weights=weights)
    train(model, GrassAdamW(model, lr=1e-2, update_interval=2), 3)
    assert all(t.is_contiguous() for t in (*model.parameters(), *model.state_dict().values()))
    assert all(layer.holds_active() for layer in rows_of(model))
    grass.expand(model)
    assert all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_row_of_each_expert(dim: int, dtype: torch.dtype) -> None:
    """A matrix of one column is not aligned as ``grouped_mm`` wants it."""
    model = Experts().to(dtype)
    plain = copy.deepcopy(model)
    grass.compact(model, rank=1, explore=0, dim=dim)
    x, ends = batch(0)
    for network in (model, plain):
        network(x.to(dtype), ends).float().square().sum().backward()
    for layer, name in zip(rows_of(model), ("up", "down"), strict=True):
        whole = getattr(plain, name).grad
        rows = (whole if layer.by_rows else whole.transpose(1, 2)).flatten(0, 1)[layer.chosen]
        found = layer.active.grad if dim == 0 else layer.active.grad.t()
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # of products rounded to bfloat16 in between
        torch.testing.assert_close(found, rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_full_gradient_is_never_formed(dim: int) -> None:
    model, _ = converted(dim)
    x, ends = batch(0)
    model(x, ends).sum().backward()
    assert model.up.grad is None
    shapes = [tuple(layer.active.grad.shape) for layer in rows_of(model)]
    rows = EXPERTS * (3 + 2)
    assert shapes == ([(rows, OUTER), (rows, INNER)] if dim == 0 else [(INNER, rows), (OUTER, rows)])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("explore", [0, 2])
def test_equals_separate_converted_layers(dim: int, explore: int) -> None:
    """Experts without tokens have no gradient there, so their rows, moments and step counts stay."""
    model, optimizer = converted(dim, explore, update_interval=1000)
    plain = Separate(copy.deepcopy(model))
    grass.compact(plain, rank=3, explore=explore, dim=dim)
    alone = GrassAdamW(plain, lr=1e-2, update_interval=1000)
    for number, (up, down) in enumerate(plain.pairs):
        for layer, rows in zip((up, down), rows_of(model), strict=True):
            own = rows.chosen_of_each()[number]
            layer.restore(own[:3], own[3:])
    if not explore:
        losses = train(model, optimizer, 9)
        assert losses == pytest.approx(train(plain, alone, 9), rel=1e-10)
        assert losses[-1] < losses[0]
        return
    losses = train(model, optimizer, 1, rests=False)  # later draws differ, because the parameters' places do
    assert losses == pytest.approx(train(plain, alone, 1, rests=False), rel=1e-10)
    for number, (up, down) in enumerate(plain.pairs):
        torch.testing.assert_close(model.up[number], up.weight, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(model.down[number], down.weight.t(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1])
def test_equals_dense_mode(dim: int) -> None:
    """Given the same rows: the largest ones of exact norms, from the second step on."""
    options: dict[str, Any] = {"selection": "top_r", "refresh": "exact", "update_interval": 1, "state_policy": "reset"}
    model, optimizer = converted(dim, 0, **options)
    dense = copy.deepcopy(model)
    grass.expand(dense)
    groups = [
        {"params": [dense.up], "dim": dim, "rank": 3, "experts": True},
        {"params": [dense.down], "dim": 1 - dim, "rank": 3, "experts": True},
    ]
    by = GrassAdamW(groups, lr=1e-2, explore=0, **{**options, "update_interval": 1000})
    x, ends = batch(0)
    with torch.no_grad():  # compact mode refreshes after a step and dense mode before one, so bring the rows over
        (dense(x, ends) - x.roll(1, 1)).square().sum()
    (dense(x, ends) - x.roll(1, 1)).square().sum().backward()
    for layer, name in zip(rows_of(model), ("up", "down"), strict=True):
        whole = getattr(dense, name).grad
        norms = (whole if layer.by_rows else whole.transpose(1, 2)).norm(dim=2).flatten()
        chosen = grass.select_rows(norms, layer.rank, "top_r", experts=EXPERTS).indices
        layer.restore(chosen, layer.explored)
    by.zero_grad()
    for group in optimizer.param_groups:
        group["update_interval"] = 1000
    assert train(model, optimizer, 9) == pytest.approx(train(dense, by, 9), rel=1e-10)
    torch.testing.assert_close(model.up, dense.up, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(model.down, dense.down, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_a_single_expert_rests(policy: str) -> None:
    """Without tokens it stays, as one of several does; also in a step that would select other rows."""
    torch.manual_seed(0)
    model: Any = Experts()
    for name in ("up", "down"):
        setattr(model, name, nn.Parameter(getattr(model, name).detach()[:1]))
    grass.compact(model, rank=3, explore=2)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=2, state_policy=policy)
    x, _ = batch(0)
    trained = []
    for tokens in (len(x), 0, len(x)):
        model(x[:tokens], torch.tensor([tokens])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(copy.deepcopy(model.state_dict()))
        state = optimizer.state[rows_of(model)[0].active]
        trained[-1] |= {"row_steps": state["row_steps"].clone(), "indices": state["indices"].clone()}
    assert same(trained[0], trained[1])
    assert not torch.equal(trained[1]["up"], trained[2]["up"])
    assert not torch.equal(trained[1]["indices"], trained[2]["indices"])


@pytest.mark.parametrize("dim", [0, 1])
def test_calibration(dim: int) -> None:
    """The largest rows of each expert; of one without tokens, as many that were drawn."""
    torch.manual_seed(0)
    model = Experts()
    plain, (x, ends) = copy.deepcopy(model), batch(1)
    grass.compact(model, rank=3, explore=2, dim=dim, calibration=lambda m: m(x, ends).square().sum())
    plain(x, ends).square().sum().backward()
    for layer, whole in zip(rows_of(model), (plain.up.grad, plain.down.grad), strict=True):
        norms = (whole if layer.by_rows else whole.transpose(1, 2)).norm(dim=2)
        for own, chosen in zip(norms, layer.chosen_of_each(), strict=True):
            assert len(set(chosen.tolist())) == 5
            assert set(chosen.tolist()) <= set(range(len(own)))
            if own.any():
                assert sorted(own.topk(3).indices.tolist()) == chosen[:3].tolist()
        assert layer.holds_active()


def test_resume_is_exact() -> None:
    for options in ({}, {"selection": "multinomial_norm"}, {"selection": "multinomial_norm", "state_policy": "bank"}):
        model, optimizer = converted(**options)
        train(model, optimizer, 5)
        other, by = converted(**options)
        other.load_state_dict(model.state_dict())
        by.load_state_dict(optimizer.state_dict())
        assert train(other, by, 6, 5) == train(model, optimizer, 6, 5)


def test_refresh_by_norms_chooses_the_largest_of_each_expert() -> None:
    model, optimizer = converted(1, 0, selection="top_r", refresh="exact", update_interval=1)
    x, ends = batch(0)
    model(x, ends).square().sum().backward()  # conversion chose; the first step has the norms for the next rows
    optimizer.step()
    optimizer.zero_grad()
    plain = copy.deepcopy(model)
    grass.expand(plain)
    for network in (model, plain):
        network(x, ends).square().sum().backward()
    optimizer.step()
    norms = plain.up.grad.norm(dim=1)
    chosen = rows_of(model)[0].chosen_of_each()
    assert torch.equal(chosen.sort().values, norms.topk(3).indices.sort().values)


def test_state_dict_is_that_of_the_plain_module() -> None:
    model, optimizer = converted()
    assert list(model.state_dict()) == ["up", "down"]
    train(model, optimizer, 4)
    x, ends = batch(0)
    plain = Experts()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.state_dict()["up"], rows_of(model)[0].weight)
    torch.testing.assert_close(plain(x, ends), model(x, ends), rtol=1e-12, atol=1e-12)
    names = grass.expand(model)
    assert names == ["up", "down"]
    assert same(model.state_dict(), plain.state_dict())
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())


def test_loading_with_assign() -> None:
    model, optimizer = converted()
    train(model, optimizer, 2)
    other, by = converted()
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    x, ends = batch(0)
    assert torch.equal(other(x, ends), model(x, ends))
    by.load_state_dict(optimizer.state_dict())
    assert train(other, by, 2, 2) == train(model, optimizer, 2, 2)


def test_changes_by_hand_are_seen() -> None:
    model, _ = converted()
    x, ends = batch(0)
    before = model(x, ends)
    with torch.no_grad():
        model.up.mul_(2.0)
    assert not torch.equal(model(x, ends), before)
    layer = rows_of(model)[0]
    assert layer.holds_active()
    with torch.no_grad():
        layer.active.zero_()
    model(x, ends)
    assert layer.holds_active()


def test_precision_and_copies() -> None:
    model, optimizer = converted()
    train(model, optimizer, 2)
    copied = copy.deepcopy(model)
    x, ends = batch(0)
    assert torch.equal(copied(x, ends), model(x, ends))
    for rows in rows_of(copied):
        assert any(rows.weight is p for p in copied.parameters())
    model.float()
    assert model(x.float(), ends).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x.to(torch.bfloat16), ends).dtype == torch.float32


def test_equally_many_tokens_of_each_expert() -> None:
    model, _ = converted()
    x = torch.randn(EXPERTS, 5, OUTER, dtype=torch.float64)
    expected = torch.einsum("etn,emn->etm", x, model.up)
    torch.testing.assert_close(grass.expert_linear(model, "up", x), expected, rtol=1e-12, atol=1e-12)
    ends = torch.tensor([5, 10, 15, 20])
    assert torch.equal(
        grass.expert_linear(model, "up", x.flatten(0, 1), ends).view(expected.shape),
        grass.expert_linear(model, "up", x),
    )


def test_tokens_behind_the_last_expert() -> None:
    for model in (converted()[0], Experts()):
        x = torch.randn(9, OUTER, dtype=torch.float64)
        y = grass.expert_linear(model, "up", x, torch.tensor([2, 2, 5, 7]))
        assert y.shape == (9, INNER)
        assert not y[7:].any()


@pytest.mark.parametrize("offload", ["cpu", grass.Offload(fraction=0.5)])
def test_offload(offload: Any) -> None:
    model, optimizer = converted()
    away, by = converted(offload=offload)
    assert train(away, by, 8) == train(model, optimizer, 8)
    assert same(away.state_dict(), model.state_dict())
    assert same(by.state_dict()["state"], optimizer.state_dict()["state"])


def test_attach() -> None:
    model, _ = converted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grass.attach(optimizer, model, update_interval=3)
    losses = train(model, optimizer, 6, rests=False)
    assert losses[-1] < losses[0]
    assert all(layer.holds_active() for layer in rows_of(model))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: grass.expert_linear(m, "side", x, torch.tensor([1, 2, 3, 4])), "name='side'"),
        (lambda m, x: grass.expert_linear(m, "up", x), "ends"),
        (lambda m, x: grass.expert_linear(m, "up", x, torch.tensor([1, 2])), "4 experts"),
        (lambda m, x: grass.expert_linear(m, "up", x.view(2, 2, -1)), "4 experts"),
        (lambda m, x: grass.compact(m, rank=11), "rank=11"),
        (lambda m, x: grass.compact(m, rank=3, explore=9), "explore=9"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    model = Experts()
    with pytest.raises(ValueError, match=message):
        call(model, torch.randn(4, OUTER, dtype=torch.float64))
    assert not any(isinstance(part, CompactLayer) for part in model.modules())


def test_converting_twice_and_frozen_experts() -> None:
    model = Experts()
    model.down.requires_grad_(False)
    assert grass.compact(model, rank=3) == ["up"]
    assert grass.compact(model, rank=3) == ["up"]
    with pytest.raises(ValueError, match="was converted with"):
        grass.compact(model, rank=4)
    x, ends = batch(0)
    model(x, ends).sum().backward()
    assert rows_of(model)[0].active.grad is not None


def test_streaming() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return x + self.experts(x, ends)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, ends)
            return x

    def run(streamed: bool, **stream: Any) -> Any:
        torch.manual_seed(0)
        model = Stack()
        grass.compact(model, rank=3, explore=2)
        optimizer = GrassAdamW(model, lr=1e-2, update_interval=3, offload="cpu" if streamed else None)
        if streamed:
            model.handle = grass.stream(model, device="cpu", **stream)  # type: ignore[assignment]
        return train(model, optimizer, 6), model

    expected, _ = run(False)
    for stream in ({}, {"cache": 1 << 30}):
        losses, model = run(True, **stream)
        assert losses == expected
        weights = sum(p.nbytes for p in (model.blocks[0].experts.up, model.blocks[0].experts.down))
        assert model.handle.units[0].nbytes < 1.5 * weights  # the weight travels once


class One(nn.Module):
    """A single expert, as a rank of expert parallelism may have."""

    grass_experts: ClassVar = {"up": False}

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(1, inner, outer))


@pytest.mark.parametrize("sizes", [(32, 64), (64, 32), (48, 32)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_a_single_expert_is_a_linear_layer(mode: str, dim: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, layer = One(*sizes), nn.Sequential(nn.Linear(sizes[1], sizes[0], bias=False))
    layer[0].weight.data = model.up.detach()[0].clone()
    optimizers = []
    options: dict[str, Any] = {"lr": 1e-2, "update_interval": 2}
    for part in (model, layer):
        if mode == "compact":
            grass.compact(part, rank=1 / 4, dim=dim)
            optimizers.append(GrassAdamW(part, **options))
        else:
            optimizers.append(GrassAdamW(grass.param_groups(part, rank=1 / 4, dim=dim), **options))
    for step in range(8):
        x = torch.randn(1, 6, sizes[1], generator=torch.Generator().manual_seed(step))
        for loss, optimizer in zip((grass.expert_linear(model, "up", x), layer(x)), optimizers, strict=True):
            loss.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.up[0], layer[0].weight, rtol=1e-4, atol=1e-5)  # float32, other products


def test_gradients_without_strides() -> None:
    """Those of sums; also inputs that repeat one token."""
    for model in (converted()[0].float(), converted()[0]):
        dtype = model.up.dtype
        x = torch.randn(1, 1, OUTER, dtype=dtype).expand(EXPERTS, 8, OUTER)
        grass.expert_linear(model, "up", x).sum().backward()
        plain = Experts().to(dtype)
        plain.load_state_dict(model.state_dict())
        grass.expert_linear(plain, "up", x).sum().backward()
        layer = rows_of(model)[0]
        whole = layer.as_matrix(plain.up.grad)[:, layer.chosen[: layer.rank]]
        torch.testing.assert_close(layer.active.grad[:, : layer.rank], whole, rtol=1e-4, atol=1e-4)


def test_attached_optimizers_explore_expert_by_expert() -> None:
    """Plain SGD moves along the gradient, so an expert without tokens stays, and others move by their own lengths."""
    model, _ = converted(1, 2)
    before = {name: p.detach().clone() for name, p in (("up", model.up), ("down", model.down))}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    grass.attach(optimizer, model, update_interval=1000)
    x, ends = batch(1)  # experts 0 and 2 have no tokens
    model(x, ends).square().sum().backward()
    optimizer.step()
    for name, then in before.items():
        moved = [not torch.equal(now, was) for now, was in zip(getattr(model, name), then, strict=True)]
        assert moved == [False, True, False, True]


def test_compiled() -> None:
    model, _ = converted()
    x, ends = batch(0)
    expected = model(x, ends)
    compiled = torch.compile(lambda given: model(given, ends) * 2, backend="eager")
    torch.testing.assert_close(compiled(x), 2 * expected)


@pytest.mark.parametrize("named", [{"dwon": True}, {"flat": False}, ["up"], {"up": "yes"}])
def test_weights_that_are_not_there(named: Any) -> None:
    model: Any = Experts()
    model.flat = nn.Parameter(torch.randn(3, 3))
    model.grass_experts = named
    for call in (grass.compact, grass.param_groups):
        with pytest.raises((ValueError, TypeError), match="grass_experts"):
            call(model, rank=2)


@pytest.mark.parametrize("ends", [[2, 1, 3, 4], [1, 2, 3, 5], [-1, 2, 3, 4]])
def test_ends_that_are_wrong(ends: list[int]) -> None:
    for model in (Experts(), converted()[0]):
        with pytest.raises(ValueError, match="ascending"):
            grass.expert_linear(model, "up", torch.randn(4, OUTER, dtype=torch.float64), torch.tensor(ends))


def test_modules_of_experts_can_be_named() -> None:
    model = nn.ModuleDict({"experts": Experts(), "other": nn.Linear(4, 4)})
    assert grass.compact(model, rank=2, exclude=["experts"]) == ["other"]
    grass.expand(model)
    assert grass.compact(model, rank=2, targets=["experts"]) == ["experts.up", "experts.down"]
    with pytest.raises(ValueError, match=r"experts\.up"):
        grass.compact(nn.ModuleDict({"experts": Experts()}), rank=2, targets=["none"])


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_history(mode: str) -> None:
    """Rows of experts in dense mode are not recorded, those of compact mode as of any layer."""
    model, optimizer = converted()
    if mode == "dense":
        grass.expand(model)
        optimizer = GrassAdamW(grass.param_groups(model, rank=3), update_interval=2)
    history = grass.diagnostics.SelectionHistory(optimizer)
    train(model, optimizer, 5)
    assert (history.layers() == ["grass_rows.up", "grass_rows.down"]) == (mode == "compact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_at_all(dtype: torch.dtype) -> None:
    """The gradient of a sum has no strides; ranks of expert parallelism may have no token for a step."""
    model = Experts()
    for name in ("up", "down"):
        setattr(model, name, nn.Parameter(torch.randn(EXPERTS, 16, 32, dtype=dtype)))
    grass.compact(model, rank=8, explore=8)
    model(torch.randn(0, 32, dtype=dtype), torch.zeros(EXPERTS, dtype=torch.long)).sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("ends", [[2, 4, 6, 8], torch.tensor([2.0, 4.0, 6.0, 8.0])])
def test_ends_are_integers(ends: object) -> None:
    with pytest.raises(TypeError, match="must be a tensor of integers"):
        grass.expert_linear(Experts(), "up", torch.randn(8, OUTER, dtype=torch.float64), ends)


def test_muon_does_not_take_experts() -> None:
    """Their columns are one matrix, which it would orthogonalise whole: experts with small gradients would stand."""
    model, _ = converted()
    columns = [layer.active for layer in rows_of(model)]
    with pytest.raises(ValueError, match="Muon would orthogonalise the experts of 'up', 'down' as one matrix"):
        grass.attach(torch.optim.Muon(columns), model)
    grass.attach(torch.optim.AdamW(columns), model)
