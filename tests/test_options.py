"""The hyperparameters are declared once; everything that lists them agrees with the declaration."""

import inspect
import re

import pytest
import torch

import grass
from grass.command_line import ArgumentParser
from grass.options import (
    DECLARED,
    DEFAULTS,
    POLICIES,
    PRECISIONS,
    ROW_KEYS,
    SHARED_KEYS,
    SPEED_KEYS,
    Options,
    check_value,
)
from grass.state import policies
from training.run.flags import add_optimizer_flags, optimizer_from_flags
from training.run.optimizers import OptimizerConfig


def defaults_of(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def documented(text: str | None) -> set[str]:
    return set(re.findall(r"^ {4,8}(\w+): ", text or "", flags=re.MULTILINE))


def test_optimizer_has_the_declared_options() -> None:
    assert defaults_of(grass.GrassAdamW) == {**DEFAULTS, "offload": None}  # which is no group's
    assert documented(grass.GrassAdamW.__doc__) >= {*DEFAULTS, "offload"}
    group = grass.GrassAdamW([torch.nn.Parameter(torch.ones(3, 3))]).param_groups[0]
    assert group.keys() == DEFAULTS.keys() | {"params"}


def test_attach_has_declared_options() -> None:
    defaults = defaults_of(grass.attach)
    own = {"scale": 1.0}  # "auto" has to be asked for: the learning rate belongs to another optimizer
    assert defaults.items() <= {**DEFAULTS, **own}.items()
    assert documented(grass.attach.__doc__) >= defaults.keys()


@pytest.mark.parametrize("name", DECLARED)
def test_every_option_says_what_it_means_and_takes(name: str) -> None:
    metadata = DECLARED[name].metadata
    assert metadata["meaning"]
    assert metadata["range"].words
    check_value(name, DEFAULTS[name])


def test_paper_and_shared_settings_are_options() -> None:
    assert grass.PAPER.keys() <= DEFAULTS.keys()
    assert set(ROW_KEYS) < set(SHARED_KEYS) < DEFAULTS.keys()
    assert set(SPEED_KEYS) == {"fused", "foreach", "amsgrad", "capturable", "differentiable"}


def test_names_have_implementations() -> None:
    assert tuple(policies.POLICIES) == POLICIES
    assert DECLARED["moment_dtype"].metadata["range"].choices == PRECISIONS


def test_view_of_a_group() -> None:
    group = grass.GrassAdamW([torch.nn.Parameter(torch.ones(3, 3))], rank=2, eps=1e-5).param_groups[0]
    options = Options.of(group)
    assert options == Options(rank=2, eps=1e-5)
    assert Options.of(options) is options
    assert Options.of({"seed": 3}) == Options(seed=3)


@pytest.mark.parametrize(
    ("name", "words", "mode", "rank"),
    [
        ("grass", [], "compact", 0.125),
        ("grass", ["--mode", "dense"], "dense", 0.25),
        ("grass", ["--rank", "16"], "compact", 16),
        ("muon", [], "compact", 0.25),
        ("adamw", [], "dense", 0.25),
    ],
)
def test_scripts_train_in_compact_mode_by_default(name: str, words: list[str], mode: str, rank: float) -> None:
    parser = ArgumentParser("")
    add_optimizer_flags(parser.add_argument)
    args = parser.parse_args(words)
    config = optimizer_from_flags(args, name)
    assert (config.name, config.compact, config.rank) == (name, mode == "compact", rank)
    assert (args.mode, args.rank) == (mode, rank), "what a resumed run is compared with"


def test_flags_are_fields_with_the_same_defaults() -> None:
    parser = ArgumentParser("")
    add_optimizer_flags(parser.add_argument)
    flags, config = vars(parser.parse_args([])), OptimizerConfig()
    assert (flags.pop("mode"), flags.pop("rank")) == (None, None)
    assert flags == {name: getattr(config, name) for name in flags}
    unset = {"update_interval", "scale"}  # of the method at hand
    assert {n: flags[n] for n in flags.keys() & DEFAULTS.keys() - unset - {"weight_decay"}}.items() <= DEFAULTS.items()
    words = [
        "--dim",
        "auto",
        "--state-policy",
        "bank",
        "--explore",
        "0.5",
        "--replacement",
        "--warmup-after-refresh",
        "3",
    ]
    parsed = parser.parse_args(words)
    assert (parsed.dim, parsed.state_policy, parsed.explore, parsed.replacement) == ("auto", "bank", 0.5, True)
    assert parser.parse_args(["--dim", "0"]).dim == 0
    assert parsed.warmup_after_refresh == 3
    assert (parser.parse_args(["--scale", "auto"]).scale, parser.parse_args(["--scale", "2"]).scale) == (None, 2.0)
