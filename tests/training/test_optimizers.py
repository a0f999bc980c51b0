import io
import sys

import pytest
import torch

from grass import GrassAdamW
from grass.memory import state_bytes
from grass.memory.llama import llama_config
from tests.training.every_optimizer import EVERY
from training.run.metrics import gradient_bytes
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig, build_optimizer

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 128, 352, 4, 257
PROJECTED = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE)
PARAMETERS = PROJECTED + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN


@pytest.fixture
def model():
    return build_llama(llama_config("1m", vocab_size=VOCAB, max_seq_len=16))


def train(model, optimizer, steps=30):
    tokens = torch.arange(64).view(4, 16)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_learns(model, name):
    lr = {"galore": 1e-2, "apollo": 1e-2, "adafactor": 0.3, "muon": 1e-2}.get(name, 3e-3)
    steps = 8 if name == "muon" else 30
    losses = train(model, build_optimizer(model, OptimizerConfig(name=name, lr=lr, update_interval=5)), steps)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("adamw", {"rank": 0.125}),
        ("adamw8bit", {"scale": 0.5}),
        ("adafactor", {"betas": (0.9, 0.95)}),
        ("muon", {"rank": 64}),
        ("galore", {"selection": "top_r"}),
        ("fira", {"explore": 0.125}),
    ],
)
def test_an_option_that_an_optimizer_does_not_read_is_named(name, option, model, caplog):
    build_optimizer(model, OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1, **option))
    ((key, value),) = option.items()
    assert f"{name} does not read {key}={value!r}\n" in caplog.text


def test_adamw_is_torch_fused(model):
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9)))
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["fused"], group["lr"], group["weight_decay"], group["betas"]) == (True, 2e-3, 0.1, (0.8, 0.9))


def test_grass_gets_every_setting(model):
    settings = {
        "update_interval": 7,
        "scale": 0.5,
        "selection": "uniform",
        "replacement": True,
        "dim": 1,
        "state_policy": "bank",
        "warmup_after_refresh": 2,
        "seed": 3,
        "decay": "all",
        "bank_dtype": "bfloat16",
        "shard_bank": True,
        "refresh": "exact",
        "sketch_size": 9,
    }
    optimizer = build_optimizer(model, OptimizerConfig(name="grass", rank=16, **settings))
    assert isinstance(optimizer, GrassAdamW)
    projected, rest = optimizer.param_groups
    assert projected["rank"] == 16
    assert {key: projected[key] for key in settings} == settings
    assert rest["rank"] is None
    assert sum(p.numel() for p in projected["params"]) == PROJECTED


@pytest.mark.parametrize("name", ["galore", "apollo", "fira"])
@pytest.mark.parametrize("rank", [32, 0.25])
def test_peers_project_the_same_weights(model, name, rank):
    optimizer = build_optimizer(model, OptimizerConfig(name=name, rank=rank, update_interval=50))
    projected, rest = optimizer.param_groups
    assert (projected["rank"], projected["update_proj_gap"]) == (32, 50)
    assert sum(p.numel() for p in projected["params"]) == PROJECTED
    assert "rank" not in rest
    assert sum(p.numel() for p in rest["params"]) == PARAMETERS - PROJECTED


@pytest.mark.slow
def test_muon_and_adamw_are_one_optimizer(model):
    """Equal to torch's own two, each over its part of the weights, under a schedule of both rates."""
    twin = build_llama(llama_config("1m", vocab_size=VOCAB, max_seq_len=16))
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=3e-3, scale=0.5, weight_decay=0.1))
    linear = {name for name, p in twin.named_parameters() if p.ndim == 2 and ".layers." in name}
    parameters = dict(twin.named_parameters())
    muon = torch.optim.Muon(
        [parameters[name] for name in sorted(linear)], lr=1.5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [p for name, p in parameters.items() if name not in linear], lr=3e-3, weight_decay=0.1, fused=True
    )
    schedules = [torch.optim.lr_scheduler.LinearLR(each, total_iters=4) for each in (optimizer, muon, adamw)]
    tokens = torch.arange(64).view(4, 16)
    for _ in range(3):
        for each, steps in ((model, [optimizer]), (twin, [muon, adamw])):
            each.zero_grad()
            each(input_ids=tokens, labels=tokens).loss.backward()
            for step in steps:
                step.step()
        for schedule in schedules:
            schedule.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, parameters[name], rtol=0, atol=0)
    assert sum(p.numel() for p in optimizer.param_groups[0]["params"]) == PROJECTED
    assert state_bytes(optimizer).device >= 4 * (PROJECTED + 2 * (PARAMETERS - PROJECTED))


def made_with_muon(scale=2.0):
    torch.manual_seed(0)
    model = build_llama(llama_config("1m", vocab_size=VOCAB, max_seq_len=16))
    config = OptimizerConfig(name="muon", compact=True, rank=0.25, update_interval=3, lr=3e-3, scale=scale)
    return model, build_optimizer(model, config)


def test_muon_in_compact_mode_goes_on_bit_for_bit():
    """Attached to the active columns; the checkpoint holds both optimizers' states and the selection."""
    whole, stopped = made_with_muon(), made_with_muon()
    train(*whole, steps=5)
    train(*stopped, steps=2)
    columns, others = whole[1].param_groups
    assert [group["lr"] for group in (columns, others)] == [3e-3, 3e-3]
    assert sum(p.numel() for p in others["params"]) == PARAMETERS - PROJECTED
    assert sum(p.numel() for p in columns["params"]) == PROJECTED // 2
    file = io.BytesIO()
    torch.save([stopped[0].state_dict(), stopped[1].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = made_with_muon()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, steps=3)
    for (name, p), ours in zip(whole[0].named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, ours), name


def test_muon_in_compact_mode_takes_the_scale_of_the_columns():
    """``n / (r + q)``, which is 2, by default."""
    trained = {}
    for scale in (None, 2.0, 1.0):
        model, optimizer = made_with_muon(scale)
        train(model, optimizer, steps=2)
        trained[scale] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(trained[None], trained[2.0])
    assert not torch.equal(trained[None], trained[1.0])


def test_bytes_of_states_and_gradients(model):
    train(model, optimizer := build_optimizer(model, OptimizerConfig(name="adamw")), steps=1)
    tensors = len(optimizer.state)
    assert gradient_bytes(model) == 4 * PARAMETERS
    assert state_bytes(optimizer) == (4 * (2 * PARAMETERS + tensors), 0)


@pytest.mark.parametrize(
    ("name", "module"),
    [("galore", "galore_torch"), ("apollo", "apollo_torch"), ("fira", "fira"), ("adamw8bit", "torchao.optim")],
)
def test_missing_peer_says_how_to_install_it(model, name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {module.partition('.')[0].replace('_', '-')} "):
        build_optimizer(model, OptimizerConfig(name=name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "'sgd'; available: adamw, grass, galore, apollo, fira, adafactor, adamw8bit, muon"),
        ({"lr": -1.0}, "lr=-1.0: must be a finite number .*>= 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be two numbers in \[0, 1\)"),
        ({"rank": 0}, "rank=0: must be an integer >= 1"),
        ({"rank": 1.5}, r"rank=1.5: must be .* fraction in \(0, 1\]"),
        ({"update_interval": 0}, "update_interval=0: must be an integer >= 1"),
        ({"selection": "topr"}, "Unknown selection 'topr'; available: top_r"),
        ({"state_policy": "banks"}, "state_policy='banks': must be one of 'reset'"),
    ],
    ids=str,
)
def test_invalid_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)
