"""Averages of weights: right by ``grass.AveragedModel``, and right or refused by other classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.optim.swa_utils import get_ema_multi_avg_fn

import grass
from grass import AveragedModel, GrassAdamW
from grass.int8 import plain_state_dict
from tests.compact_mode.networks import Network, batches, compact_layers, loss_of, plain_copy, train
from tests.experts.models import Experts, batch
from tests.experts.models import train as train_experts

DECAY = 0.9
MODELS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "float32 over bf16": (torch.bfloat16, {"dtype": torch.float32}),
    "int8": (torch.float32, {"weights": "int8"}),
    "rows": (torch.float32, {"dim": 0, "explore": 1.0}),
}


def built(dtype: torch.dtype, options: dict[str, Any], **of_optimizer: Any) -> tuple[Network, GrassAdamW]:
    model = Network(dtype)
    grass.compact(model, **{"rank": 3, "explore": 3, **options})
    return model, GrassAdamW(model, lr=3e-2, update_interval=3, **of_optimizer)


class Oracle:
    """The average of all values of a plain state dict, in float64."""

    def __init__(self, ema: bool) -> None:
        self.ema, self.count, self.values = ema, 0, {}

    def update(self, model: nn.Module) -> None:
        now = {name: value.double() for name, value in plain_state_dict(model).items()}
        share = 1.0 if not self.count else (1 - DECAY if self.ema else 1 / (self.count + 1))
        self.values = {name: (1 - share) * self.values.get(name, value) + share * value for name, value in now.items()}
        self.count += 1

    def check(self, module: nn.Module) -> None:
        found = module.state_dict()
        assert found.keys() == self.values.keys()
        for name, value in self.values.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ema", [True, False], ids=["EMA", "SWA"])
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_averages_the_weights(name: str, offload: str | None, ema: bool) -> None:
    """Across refreshes, with explored rows; steps on the host are waited for."""
    model, optimizer = built(*MODELS[name], offload=offload)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY) if ema else None)
    oracle = Oracle(ema)
    for step in batches(8, dtype=MODELS[name][0]):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        oracle.update(model)
    oracle.check(averaged.module)
    assert all(p.dtype == torch.float32 for p in averaged.module.parameters())
    plain = plain_copy(model).float()
    plain.load_state_dict({key: value.float() for key, value in oracle.values.items()})
    x = batches(1)[0][0]
    torch.testing.assert_close(averaged(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_experts(weights: str | None) -> None:
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=2, weights=weights)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=2)
    averaged, oracle = AveragedModel(model), Oracle(ema=False)
    for step in range(5):
        train_experts(model, optimizer, 1, step)
        averaged.update_parameters(model)
        oracle.update(model)
    oracle.check(averaged.module)
    assert averaged(*batch(0)).isfinite().all()


def test_streamed_model() -> None:
    model, optimizer = built(*MODELS["float32"])
    averaged, oracle = AveragedModel(model), Oracle(ema=False)
    stream = grass.stream(model, device="cpu", units=["up", "mix", "down"])
    for step in batches(5):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        oracle.update(model)
    stream.close()
    oracle.check(averaged.module)


@pytest.mark.parametrize("name", MODELS)
def test_trains_on_from_the_average(name: str) -> None:
    model, optimizer = built(*MODELS[name])
    averaged = AveragedModel(model)
    for step in batches(5, dtype=MODELS[name][0]):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    tolerance = {"int8": 2e-2, "float32": 1e-6, "rows": 1e-6}.get(name, 8e-3)  # the spacing of the weights
    for key, value in plain_state_dict(model).items():
        torch.testing.assert_close(value.float(), averaged.module.state_dict()[key], rtol=tolerance, atol=tolerance)
    losses = train(model, optimizer, batches(2, dtype=MODELS[name][0]))
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_of_the_average_changes_nothing(name: str, offload: str | None) -> None:
    """The average is put in and taken out again, more than once; active rows may be finer than the weight."""
    runs = []
    for evaluates in (False, True):
        model, optimizer = built(*MODELS[name], offload=offload)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for number, step in enumerate(batches(8, dtype=MODELS[name][0])):
            train(model, optimizer, [step])
            averaged.update_parameters(model)
            if evaluates and number % 2:
                own = copy.deepcopy(model.state_dict())
                for values in (averaged.module.state_dict(), averaged.module.state_dict(), own, own):
                    model.load_state_dict(values)
                    model.train(values is own)
                    with torch.no_grad():
                        loss_of(model, step)
        finer = {f"{key} active": layer.active.detach() for key, layer in compact_layers(model).items()}
        runs.append({**plain_state_dict(model), **finer})
    assert all(torch.equal(a, b) for a, b in zip(*(run.values() for run in runs), strict=True))


def test_an_evaluation_of_the_average_after_a_resume() -> None:
    """Active rows that are finer than the weight come from the optimizer's state, before any step."""
    model, optimizer = built(*MODELS["float32 over bf16"])
    train(model, optimizer, batches(5, dtype=torch.bfloat16))
    other, other_optimizer = built(*MODELS["float32 over bf16"])
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    own = copy.deepcopy(other.state_dict())
    for values in ({key: value * 0.5 for key, value in own.items()}, own):
        other.load_state_dict(values)
        with torch.no_grad():
            loss_of(other, batches(1, dtype=torch.bfloat16)[0])
    for (name, ours), theirs in zip(compact_layers(model).items(), compact_layers(other).values(), strict=True):
        assert not torch.equal(ours.active, ours.active.bfloat16().float())
        assert torch.equal(ours.active, theirs.active), name


def test_buffers_of_half_precision_fit_the_averages() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16)).bfloat16()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    swa_utils.update_bn([torch.randn(8, 12)], averaged)
    assert averaged(torch.randn(8, 12)).dtype == torch.float32


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers(use_buffers: bool) -> None:
    """The same as torch's class on the plain model, also in dense mode."""
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    averages = []
    for convert in (True, False):
        own = copy.deepcopy(model)
        if convert:
            grass.compact(own, rank=1.0, explore=0)
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=1e-2)
        if convert:
            grass.attach(optimizer, own)
        for cls in (AveragedModel, swa_utils.AveragedModel)[: 1 if convert else 2]:
            averages.append((cls(own, use_buffers=use_buffers), own, optimizer))
    for step in batches(4):
        for number, (averaged, own, optimizer) in enumerate(averages):
            if number < 2:  # the last two watch one model
                train(own, optimizer, [step])
            averaged.update_parameters(own)
    expected = averages[2][0].state_dict()
    for averaged, *_ in averages[:2]:
        found = averaged.state_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def test_wrappers_are_taken_off() -> None:
    model, optimizer = built(*MODELS["float32"])
    compiled = torch.compile(model, backend="eager")
    averaged = AveragedModel(compiled)
    train(compiled, optimizer, batches(2))
    averaged.update_parameters(compiled)
    for key, value in averaged.module.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    averaged.update_parameters(wrapped)
    assert averaged.n_averaged == 2


def test_another_model() -> None:
    model, _ = built(*MODELS["float32"])
    averaged = AveragedModel(model)
    with pytest.raises(ValueError, match=r"'up.weight' has shape \(20, 12\), but the model has none of this name"):
        averaged.update_parameters(nn.Linear(3, 3))
    other = Network()
    other.mix = nn.Linear(20, 17)
    with pytest.raises(ValueError, match=r"'mix.weight' has shape \(16, 20\), but the model has shape \(17, 20\)"):
        averaged.update_parameters(other)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
        AveragedModel([model])  # type: ignore[arg-type]


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grass.averaging.is_sharded", lambda p: p.ndim == 2)
    with pytest.raises(ValueError, match="whole parameters, got DTensors"):
        AveragedModel(Network())


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("name", ["float32", "float32 over bf16", "rows"])
def test_torchs_own_class(name: str, use_buffers: bool) -> None:
    """It averages ``active`` too, to no purpose; the weight wins."""
    model, optimizer = built(*MODELS[name])
    averaged, plain = (
        swa_utils.AveragedModel(model, use_buffers=use_buffers),
        swa_utils.AveragedModel(plain_copy(model)),
    )
    for step in batches(8, dtype=MODELS[name][0]):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        plain.update_parameters(plain_copy(model))
    for key, value in plain.module.state_dict().items():
        assert torch.equal(averaged.module.state_dict()[key], value), key


@pytest.mark.parametrize("read", [lambda m: m.eval(), lambda m: m(batches(1)[0][0]), lambda m: m.state_dict()])
def test_torchs_own_class_refuses_codes(read: Any) -> None:
    model, optimizer = built(*MODELS["int8"])
    averaged = swa_utils.AveragedModel(model)
    for step in batches(4):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
    with pytest.raises(RuntimeError, match=r"8-bit codes and the active rows of 'up'.*grass\.AveragedModel"):
        read(averaged)
    loss_of(model, batches(1)[0])  # the model itself has not changed


@pytest.mark.parametrize("name", [name for name in MODELS if name != "int8"])
def test_a_target_network_is_copied_through_data(name: str) -> None:
    """Parameter by parameter, as in Q-learning: other columns are active there, and the weight is what counts."""
    dtype = MODELS[name][0]
    model, optimizer = built(*MODELS[name])
    target = copy.deepcopy(model)
    for step in batches(40, dtype=dtype):
        loss_of(target, step)
        train(model, optimizer, [step])
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.data.copy_(q.data)
        loss_of(target, step)
        values = [plain_state_dict(each).values() for each in (target, model)]
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_averages_put_in_through_data_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """As ``EMAModel`` of diffusers does: averages by parameter where it trains, and all written through ``.data``."""
    model, optimizer = built(*MODELS["float32"])
    shadows: list[Tensor] = [p.detach().clone() for p in model.parameters()]
    for step in batches(5):
        train(model, optimizer, [step])
        for shadow, p in zip(shadows, model.parameters(), strict=True):
            shadow.lerp_(p.detach(), 1 - DECAY if p.requires_grad else 1.0)
    for shadow, p in zip(shadows, model.parameters(), strict=True):
        p.data.copy_(shadow)
    model.eval()
    assert "average by grass.AveragedModel" in caplog.text
