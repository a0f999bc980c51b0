"""What the factory makes of ``TrainingArguments``, keywords and model."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass.compact_mode.layer import CompactLayer
from tests.integrations.runs import MODES, Build, arguments, trainer

transformers = pytest.importorskip("transformers")
from grass.integrations.transformers import GrassFactory, GrassTrainer  # noqa: E402
from tests.distributed.world import in_own_process  # noqa: E402

ROOT = Path(__file__).parents[2]


class Norms(nn.Module):
    """Parameters that Trainer lets decay, and those that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8, bias=False)
        self.bias_gate = nn.Linear(8, 8, bias=False)


def names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [sorted(group["param_names"]) for group in optimizer.param_groups]


def projected(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the layers whose rows are selected."""
    if any(isinstance(module, CompactLayer) for module in model.modules()):
        return {name for name, module in model.named_modules() if isinstance(module, CompactLayer)}
    groups = [group["param_names"] for group in optimizer.param_groups if group["rank"] is not None]
    return {name.removesuffix(".weight") for group in groups for name in group}


@pytest.mark.parametrize("mode", MODES)
def test_values_of_the_arguments(tmp_path: Path, mode: str) -> None:
    args = arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, seed=5)
    optimizer = GrassFactory()(Norms(), args=args, **MODES[mode])
    assert type(optimizer) is grass.GrassAdamW
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["seed"]) == (1e-2, (0.8, 0.95), 1e-6, 5)
        assert group["update_interval"] == 2


def test_the_default_mode_is_the_documented_one(tiny_llama: Build, tmp_path: Path) -> None:
    """The factory's signature holds it; trainer, README, guide and reference agree."""
    default = signature(GrassFactory.__call__).parameters["mode"].default
    run = GrassTrainer(tiny_llama(), arguments(tmp_path), grass={"rank": 4})
    run.create_optimizer()
    converted = any(isinstance(module, CompactLayer) for module in run.model.modules())
    assert default == ("compact" if converted else "dense")
    assert f'mode: ``"{default}"``, the default' in str(GrassFactory.__call__.__doc__)
    for guide in ("README.md", "docs/finetuning.md"):
        assert f"It trains in {default} mode;" in (ROOT / guide).read_text()


def test_keywords_win(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim_target_modules=["down"])
    model = Norms()
    chosen = {"lr": 3e-4, "betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.3, "seed": 9, "targets": ["up"]}
    optimizer = GrassFactory()(model, args=args, rank=2, **chosen)
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in chosen if key != "targets"} | {"targets": ["up"]} == chosen
    assert projected(model, optimizer) == {"up"}


@pytest.mark.parametrize("mode", MODES)
def test_exclude(mode: str) -> None:
    model = Norms()
    assert projected(model, GrassFactory()(model, exclude=["bias_gate", "up"], **MODES[mode])) == {"down"}


def test_without_arguments() -> None:
    optimizer = GrassFactory()(Norms(), rank=2)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["weight_decay"] == 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_what_decays(tmp_path: Path, mode: str) -> None:
    """As under Trainer's own optimizer: weights and active rows, but no norms, biases or what is called so."""
    args, model = arguments(tmp_path), Norms()
    plain = transformers.Trainer(model, args)
    expected = {n: g["weight_decay"] for g in named_groups(plain.create_optimizer(), model) for n in g["names"]}
    optimizer = GrassFactory()(model, args=args, **MODES[mode])
    decay = {n: group["weight_decay"] for group in optimizer.param_groups for n in group["param_names"]}
    assert {name.replace(".active", ".weight"): value for name, value in decay.items()} == expected
    assert decay["norm.weight"] == decay["up.bias"] == 0
    assert set(decay.values()) == {0.0, 0.1}


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_says_itself_what_decays(mode: str, tiny_llama: Build, tmp_path: Path) -> None:
    """Its ``get_decay_parameter_names`` may be overridden; names of weights stand for their active columns."""

    class Trainer(GrassTrainer):
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            names = super().get_decay_parameter_names(model)
            return [name for name in names if "embed" not in name and not name.endswith("up_proj.weight")]

    run = Trainer(tiny_llama(), arguments(tmp_path, weight_decay=0.1), grass=MODES[mode])
    decay = {
        name: group["weight_decay"] for group in run.create_optimizer().param_groups for name in group["param_names"]
    }
    free = {name for name, value in decay.items() if value == 0}
    assert {name for name in decay if "embed" in name or "up_proj" in name or "norm" in name} == free
    assert set(decay.values()) == {0.0, 0.1}


def named_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    return [{**group, "names": [name_of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        (None, "attention mlp"),
        ("all-linear", "attention mlp"),
        ("all_linear", "attention mlp"),
        (["attn", "mlp"], "attention mlp"),
        (["self_attn"], "attention"),
        ([r".*\.mlp\..*"], "mlp"),
        (r".*\.layers\.\d+\.mlp\..*", "mlp"),
        (["down_proj"], "down"),
    ],
    ids=str,
)
def test_target_modules(tiny_llama: Build, tmp_path: Path, mode: str, wanted: Any, layers: str) -> None:
    """As Trainer reads them for GaLore: any part of a name, or a regular expression for the whole of it."""
    model = tiny_llama()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parts = {"attention": "self_attn", "mlp": "mlp", "down": "down_proj"}
    expected = {name for name in linear if any(parts[part] in name for part in layers.split())}
    optimizer = GrassFactory()(model, args=arguments(tmp_path, optim_target_modules=wanted), **MODES[mode])
    assert projected(model, optimizer) == expected


def test_target_modules_that_match_nothing(tiny_llama: Build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"targets=\['nothing'\].*match no linear layer"):
        GrassFactory()(tiny_llama(), args=arguments(tmp_path, optim_target_modules=["nothing"]), rank=4)


def test_conversion(tiny_llama: Build) -> None:
    """Rank, dim, precision and seed reach the conversion; a model converted before is taken as it is."""
    model = tiny_llama().to(torch.bfloat16)
    optimizer = GrassFactory()(model, rank=4, dim=0, dtype=torch.float32, seed=3)
    layer = model.model.layers[0].mlp.up_proj
    assert (layer.dim, layer.active.dtype, layer.active.shape) == (0, torch.float32, (8, 32))
    expected = tiny_llama()
    grass.compact(expected, rank=4, explore=0, dim=0, seed=3)
    assert torch.equal(layer.selected, expected.model.layers[0].mlp.up_proj.selected)
    again = GrassFactory()(model)
    assert names(again) == names(optimizer)
    assert again.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize(
    ("keywords", "converted", "message"),
    [
        ({"mode": "sparse", "rank": 4}, False, "Invalid mode='sparse'"),
        ({"mode": "dense"}, False, "mode='dense' takes a rank"),
        ({"mode": "dense", "rank": 4}, True, "plain model"),
        ({}, False, "give a rank"),
        ({"rank": 4, "update_interval": 0}, False, "Invalid update_interval=0"),
        ({"rank": 0}, False, "Invalid rank=0"),
        ({"rank": 2}, True, "converted with rank=4"),
        ({"rank": 4, "weights": "int8"}, False, "int8 codes"),
        ({"rank": 4, "targets": ["nothing"]}, False, "match no linear layer"),
    ],
    ids=str,
)
def test_errors(keywords: dict[str, Any], converted: bool, message: str) -> None:
    model = Norms()
    if converted:
        grass.compact(model, rank=4, explore=0)
    with pytest.raises(ValueError, match=message):
        GrassFactory()(model, **keywords)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="rnak"):
        GrassFactory()(Norms(), rank=4, rnak=4)


@in_own_process
def test_a_wrapped_model_is_too_late() -> None:
    with pytest.raises(RuntimeError, match="Too late to convert: DistributedDataParallel"):
        GrassFactory()(nn.parallel.DistributedDataParallel(Norms()), rank=4)
    sharded = torch.distributed.fsdp.fully_shard(Norms())
    with pytest.raises(RuntimeError, match="Too late to convert: FSDPNorms"):
        GrassFactory()(sharded, rank=4)


def test_two_optimizers(tiny_llama: Build, tmp_path: Path) -> None:
    model, args = tiny_llama(), arguments(tmp_path)
    for given in (
        {"optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None)},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})},
    ):
        with pytest.raises(ValueError, match="chooses the optimizer"):
            GrassTrainer(model, args, grass={"rank": 4}, **given)


@pytest.mark.parametrize("mode", MODES)
def test_mixin_factory_and_plain_loop_are_one(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """The mixin is the factory under plain Trainer, and both are ``GrassAdamW`` in a loop of one's own."""
    runs = []
    args = arguments(tmp_path, lr_scheduler_type="constant", warmup_steps=0, train_sampling_strategy="sequential")
    mixed = trainer(tiny_llama(), args, mode)
    dataset = mixed.train_dataset
    keywords = {"args": args, **MODES[mode]}
    plain = transformers.Trainer(
        tiny_llama(), args, train_dataset=dataset, optimizer_cls_and_kwargs=(GrassFactory, keywords)
    )
    for each in (mixed, plain):
        each.train()
        runs.append(each.model.state_dict())
    model = tiny_llama()
    optimizer = GrassFactory()(model, **keywords)
    for step in range(6):
        batch = {key: torch.stack([row[key] for row in dataset[2 * step : 2 * step + 2]]) for key in dataset[0]}
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        model.zero_grad()
    runs.append(model.state_dict())
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name
        torch.testing.assert_close(value, runs[2][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", ["trainer", "factory"])
def test_options_misspelt(tiny_llama: Build, tmp_path: Path, build: str) -> None:
    model = tiny_llama()
    make = {
        "trainer": lambda: GrassTrainer(model, arguments(tmp_path), grass={"rnk": 3}),
        "factory": lambda: GrassFactory()(model, rnk=3),
    }
    with pytest.raises(TypeError, match=r"no option 'rnk', did you mean 'rank'\?: must be one of amsgrad, .*selection"):
        make[build]()
    assert not any(isinstance(module, CompactLayer) for module in model.modules())


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"optimizer": "sgd"}, ValueError, "Invalid optimizer='sgd': must be one of 'adamw', 'muon'"),
        ({"optimizer": "muon", "mode": "dense"}, ValueError, "Invalid optimizer='muon' with mode='dense'"),
        ({"optimizer": "muon", "moment_dtype": "8bit"}, TypeError, "no option 'moment_dtype'.*momentum"),
        ({"momentum": 0.9}, TypeError, "no option 'momentum'.*moment_dtype"),
    ],
    ids=["unknown", "dense", "AdamW's option", "Muon's option"],
)
def test_what_an_optimizer_does_not_take(
    tiny_llama: Build, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_llama()
    with pytest.raises(error, match=message):
        GrassFactory()(model, rank=4, **keywords)
    assert not any(isinstance(module, CompactLayer) for module in model.modules())


def test_muon_takes_its_part_of_the_arguments(tiny_llama: Build, tmp_path: Path) -> None:
    args = arguments(tmp_path, adam_beta1=0.8, optim_args="momentum=0.9,update_interval=7")
    optimizer = GrassFactory()(tiny_llama(), args=args, rank=4, optimizer="muon")
    assert isinstance(optimizer, grass.GrassMuon)
    assert {(group["muon"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups} == {
        (True, 0.9, None),
        (False, None, (0.8, 0.999)),
    }
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    assert optimizer.attachment.options.update_interval == 7


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_8bit", "sgd"])
def test_another_optimizer_is_refused(tiny_llama: Build, tmp_path: Path, optim: str) -> None:
    args = arguments(tmp_path, optim=optim)
    with pytest.raises(ValueError, match=f"Invalid optim='{optim}': Grass brings its own optimizer"):
        trainer(tiny_llama(), args, "compact")
    with pytest.raises(ValueError, match=f"Invalid optim='{optim}'"):
        GrassFactory()(tiny_llama(), args=args, rank=4)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_trainers_names_of_adamw_are_accepted(tiny_llama: Build, tmp_path: Path, optim: str) -> None:
    trainer(tiny_llama(), arguments(tmp_path, optim=optim), "compact")


def test_arguments_by_position(tmp_path: Path, tiny_llama: Build) -> None:
    """Some trainers pass their arguments as the second positional one."""
    optimizer = GrassFactory()(tiny_llama(), arguments(tmp_path, learning_rate=0.125), rank=4)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_reference_model_that_follows_by_order(tmp_path: Path, tiny_llama: Build) -> None:
    """TRL's callback pairs parameters by ``zip``: those of a converted model are others."""
    args = arguments(tmp_path)
    args.sync_ref_model = True
    with pytest.raises(ValueError, match=r"sync_ref_model=True.*mode='dense'"):
        GrassFactory()(tiny_llama(), args, rank=4)
    GrassFactory()(tiny_llama(), args, mode="dense", rank=4)
