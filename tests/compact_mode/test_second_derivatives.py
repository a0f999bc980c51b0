"""``create_graph=True``: second derivatives of converted layers are those of plain ones, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import Network, batches, compact_layers, loss_of, plain_copy, train
from tests.experts.models import Experts, batch


def networks(dim: int, explore: int, weights: str | None = None) -> tuple[nn.Module, nn.Module]:
    """A network that has trained for some steps, across a refresh, and the same one without Grass."""
    model = Network(torch.float64)
    grass.compact(model, rank=3, explore=explore, dim=dim, weights=weights)
    train(model, GrassAdamW(model, lr=1e-2, update_interval=2), batches(5, dtype=torch.float64))
    model.zero_grad()
    return model, plain_copy(model)


def expected_rows(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """The gradients of the plain weights as those of active rows: explored ones are scaled."""
    found = {}
    for name, layer in compact_layers(model).items():
        grad = plain.get_submodule(name).weight.grad.index_select(layer.dim, layer.chosen)
        layer.explored_part(grad).mul_(layer.gradient_scale)
        found[name] = grad
    return found


def assert_gradients(model: nn.Module, plain: nn.Module, rtol: float = 1e-10) -> None:
    for name, expected in expected_rows(model, plain).items():
        torch.testing.assert_close(model.get_submodule(name).active.grad, expected, rtol=rtol, atol=1e-12)  # float64
        if model.get_submodule(name).bias is not None:
            ours, theirs = (m.get_submodule(name).bias.grad for m in (model, plain))
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("explore", [0, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_penalty_on_the_input_gradient(dim: int, explore: int) -> None:
    model, plain = networks(dim, explore)
    for m in (model, plain):
        x, target = batches(1, dtype=torch.float64, seed=3)[0]
        x.requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(m, (x, target)), x, create_graph=True)
        slope.square().sum().backward()
    assert_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:Using backward")  # it makes a reference cycle
@pytest.mark.parametrize("way", ["grad", "backward", "backward inputs"])
@pytest.mark.parametrize("dim", [0, 1])
def test_products_with_the_hessian(dim: int, way: str) -> None:
    """Without explored rows, whose scale would count twice."""
    model, plain = networks(dim, explore=0)
    batch = batches(1, dtype=torch.float64, seed=3)[0]
    torch.manual_seed(5)
    along = {name: torch.randn_like(layer.active) for name, layer in compact_layers(model).items()}
    found = {}
    for m in (model, plain):
        parameters = {n: m.get_submodule(n).active if m is model else m.get_submodule(n).weight for n in along}
        loss = loss_of(m, batch)
        if way == "grad":
            slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        else:
            loss.backward(create_graph=True, **({"inputs": list(parameters.values())} if "inputs" in way else {}))
            slopes = [p.grad for p in parameters.values()]
        product = sum(
            (slope * along[n]).sum()
            if m is model
            else (slope.index_select(dim, model.get_submodule(n).chosen) * along[n]).sum()
            for n, slope in zip(parameters, slopes, strict=True)
        )
        found[m] = torch.autograd.grad(product, list(parameters.values()))
        m.zero_grad(set_to_none=True)
    for name, ours, theirs in zip(along, found[model], found[plain], strict=True):
        chosen = model.get_submodule(name).chosen
        torch.testing.assert_close(ours, theirs.index_select(dim, chosen), rtol=1e-10, atol=1e-12)  # float64
        assert ours.abs().max() > 1e-6


def test_eight_bits() -> None:
    """The active rows depend on themselves; the other rows are the decoded codes."""
    model, plain = networks(1, 0, weights="int8")
    for m in (model, plain):
        x, target = (t.clone() for t in batches(1, dtype=torch.float64, seed=3)[0])
        x.requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(m, (x, target)), x, create_graph=True)
        slope.square().sum().backward()
    for name, expected in expected_rows(model, plain).items():
        ours = model.get_submodule(name).active.grad.double()
        assert (ours - expected).norm() < 0.05 * expected.norm()  # forward has codes where backward has active rows


def test_ordinary_steps_after_it() -> None:
    """A second derivative leaves nothing behind that ordinary training would see."""
    model, _ = networks(1, 4)
    other, _ = networks(1, 4)
    x, target = batches(1, dtype=torch.float64, seed=3)[0]
    torch.autograd.grad(loss_of(model, (x, target)), [model.up.active], create_graph=True)
    for m in (model, other):
        train(m, GrassAdamW(m, lr=1e-2), batches(3, dtype=torch.float64, seed=9))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_experts_refuse() -> None:
    model = Experts()
    grass.compact(model, rank=2)
    loss = model(*batch(0)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True does not work here"):
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)


@pytest.mark.parametrize("around", ["checkpoint", "stream"])
def test_forwards_that_run_again_in_backward(around: str) -> None:
    """Checkpointed and streamed layers have the second derivatives of layers that keep their inputs."""

    def gradients(again: bool) -> list[Tensor]:
        torch.manual_seed(0)
        units = [nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.Tanh()) for _ in range(6)]
        model, x = nn.Sequential(*units), torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
        grass.compact(model, rank=4, targets="all-linear")
        if again and around == "stream":
            grass.stream(model, device="cpu")
        y = x
        for unit in model:
            y = checkpoint(unit, y, use_reentrant=False) if again and around == "checkpoint" else unit(y)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(again=False)
    assert len(expected) == 12
    torch.testing.assert_close(gradients(again=True), expected, rtol=1e-12, atol=1e-12)  # float64
