"""``param_groups``: which weights of which models are projected."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW, param_groups
from tests.reference import train

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
FEED_FORWARD = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def llama_names(parts: list[str], layers: tuple[int, ...] = (0, 1)) -> set[str]:
    return {f"model.layers.{i}.{part}.weight" for i in layers for part in parts}


def projected(groups: list[dict]) -> set[str]:
    return {name for group in groups if group["rank"] is not None for name, _ in group["params"]}


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    """``Conv1D`` layers, whose weight is (in, out), and a head tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def check_complete(model: nn.Module, groups: list[dict]) -> None:
    """Every trainable parameter is in exactly one group."""
    given = [(name, id(p)) for group in groups for name, p in group["params"]]
    assert len(given) == len(set(given))
    assert set(given) == {(name, id(p)) for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama(tiny_llama: Callable[..., nn.Module], tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    groups = param_groups(model, 4)
    assert projected(groups) == llama_names(ATTENTION + FEED_FORWARD)
    check_complete(model, groups)
    assert [group["rank"] for group in groups] == [4, None]


def test_gpt2(gpt2: nn.Module) -> None:
    groups = param_groups(gpt2, 4)
    parts = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert projected(groups) == {f"transformer.h.0.{part}.weight" for part in parts}
    check_complete(gpt2, groups)


@pytest.mark.parametrize("order", [("table", "middle", "readout"), ("readout", "middle", "table")], ids=str)
def test_shared_weights_stay_at_full_rank(order: tuple[str, ...]) -> None:
    """Whatever the module that shares one is called, and whichever of the two gives the parameter its name."""
    modules = {"table": nn.Embedding(10, 6), "middle": nn.Linear(6, 6), "readout": nn.Linear(6, 10)}
    modules["readout"].weight = modules["table"].weight
    model = nn.ModuleDict({name: modules[name] for name in order})
    groups = param_groups(model, 2)
    assert projected(groups) == {"middle.weight"}
    check_complete(model, groups)


def test_plain_mlp() -> None:
    model = mlp()
    groups = param_groups(model, 2)
    assert projected(groups) == {"0.weight", "3.weight"}
    check_complete(model, groups)


LLAMA_TARGETS = {
    "all-linear": ("all-linear", (), llama_names(ATTENTION + FEED_FORWARD)),
    "regex": (r".*\.mlp\..*_proj", (), llama_names(FEED_FORWARD)),
    "regex for one layer": (r"model\.layers\.1\..*", (), llama_names(ATTENTION + FEED_FORWARD, (1,))),
    "regex matches whole names": ("q_proj|.*v_proj", (), llama_names(["self_attn.v_proj"])),
    "list of suffixes": (["q_proj", "mlp.down_proj"], (), llama_names(["self_attn.q_proj", "mlp.down_proj"])),
    "exclude by suffix": (None, ["o_proj", "down_proj"], llama_names(ATTENTION[:3] + FEED_FORWARD[:2])),
    "exclude by regex": (None, r".*layers\.0\..*", llama_names(ATTENTION + FEED_FORWARD, (1,))),
    "both": (["q_proj", "v_proj"], r".*\.0\..*", llama_names(["self_attn.q_proj", "self_attn.v_proj"], (1,))),
}


@pytest.mark.parametrize(("targets", "exclude", "expected"), LLAMA_TARGETS.values(), ids=LLAMA_TARGETS.keys())
def test_targets(tiny_llama, targets, exclude, expected: set[str]) -> None:
    model = tiny_llama()
    groups = param_groups(model, 4, targets=targets, exclude=exclude)
    assert projected(groups) == expected
    check_complete(model, groups)


def test_a_suffix_is_whole_components() -> None:
    """``proj`` does not match ``q_proj``."""
    model = nn.ModuleDict({"proj": nn.Linear(4, 4), "q_proj": nn.Linear(4, 4)})
    assert projected(param_groups(model, 1, targets=["proj"])) == {"proj.weight"}


NOTHING = {
    "no such name": dict(targets=["query"]),
    "no such regex": dict(targets="layers.*"),
    "empty list": dict(targets=[]),
    "all excluded": dict(exclude=".*"),
    "all excluded by name": dict(exclude="all-linear"),
}


@pytest.mark.parametrize("arguments", NOTHING.values(), ids=NOTHING.keys())
def test_nothing_matches(arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"(?i)match"):
        param_groups(mlp(), 2, **arguments)


def test_model_without_linear_layers() -> None:
    with pytest.raises(ValueError, match=r"(?i)match"):
        param_groups(nn.Embedding(4, 4), 2)


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    groups = param_groups(model, 2)
    assert projected(groups) == {"3.weight"}
    check_complete(model, groups)


def test_overrides_reach_the_projected_group_only() -> None:
    first, rest = param_groups(mlp(), 0.5, update_interval=7, dim=1, state_policy="keep")
    assert (first["rank"], first["update_interval"], first["dim"], first["state_policy"]) == (0.5, 7, 1, "keep")
    assert set(rest) == {"params", "rank"}


def test_model_is_unchanged() -> None:
    model = mlp()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    param_groups(model, 2)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("dim", [0, 1, "auto"])
def test_groups_train(tiny_llama, token_batches, dim: int | str) -> None:
    """The documented two lines, end to end: the loss falls and only projected weights have row indices."""
    model = tiny_llama()
    optimizer = GrassAdamW(param_groups(model, 0.5, dim=dim, update_interval=10, state_policy="keep"), lr=5e-3)
    losses = train(model, optimizer, token_batches[:30])
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    rows = {n for n, p in model.named_parameters() if "indices" in optimizer.state[p]}
    assert rows == llama_names(ATTENTION + FEED_FORWARD)


def test_gpt2_trains(gpt2: nn.Module, token_batches: list[torch.Tensor]) -> None:
    losses = train(gpt2, GrassAdamW(param_groups(gpt2, 8), lr=5e-3), token_batches[:20])
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_misspelt_override_is_refused() -> None:
    with pytest.raises(TypeError, match="update_intervall"):
        param_groups(nn.Linear(4, 4), 2, update_intervall=7)


def test_what_does_not_decay_makes_groups_of_its_own(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    groups = param_groups(model, 4, no_decay=["bias", r".*norm.*", "q_proj.weight"], update_interval=7)
    check_complete(model, groups)
    still = {name for group in groups for name, _ in group["params"] if group.get("weight_decay") == 0.0}
    assert still == {n for n, _ in model.named_parameters() if "norm" in n or n.endswith(("bias", "q_proj.weight"))}
    assert {group["rank"]: group.get("update_interval") for group in groups} == {4: 7, None: None}
    optimizer = GrassAdamW(groups, lr=0.0, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5, 0.0, 0.0]
    assert groups[0]["params"]
    assert not {n for n, _ in groups[0]["params"]} & still


def test_no_decay_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"no_decay=\['biass'\] matches no parameter; some are: "):
        param_groups(mlp(), 2, no_decay=["biass"])


def test_adapters_stay_at_full_rank() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2))
    with pytest.raises(ValueError, match="part of a PEFT adapter"):
        param_groups(model, 0.5)
    model.base_model.model[1].requires_grad_(True)
    groups = param_groups(model, 0.5)
    check_complete(model, groups)
    assert projected(groups) == {"base_model.model.1.weight"}


@pytest.mark.parametrize(("given", "says"), [("bare", True), ("group", True), ("groups", False), ("one", False)])
def test_a_rank_for_bare_tensors_says_what_it_holds_for(given: str, says: bool, caplog) -> None:
    model = mlp()
    params = {
        "bare": model.parameters(),
        "group": [{"params": model.parameters()}],
        "groups": param_groups(model, 0.5),
        "one": [next(model.parameters())],
    }
    caplog.clear()
    GrassAdamW(params[given], rank=0.5)
    assert ("rank=0.5 holds for all 2 matrices given, embeddings" in caplog.text) == says


@pytest.mark.parametrize("target", ["typo", "mlp.typo_proj", ".*typo.*"])
def test_a_target_that_matches_nothing_is_named_beside_one_that_does(tiny_llama, target: str) -> None:
    for call in (
        grass.matched_modules,
        functools.partial(grass.compact, rank=2),
        functools.partial(param_groups, rank=2),
    ):
        with pytest.raises(ValueError, match=f"'{re.escape(target)}' in targets=.* matches no linear layer"):
            call(tiny_llama(), targets=["q_proj", target])


def test_groups_without_names_may_follow() -> None:
    """Torch wants names in all groups or in none, which holds for names that the user has given."""
    model, head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), nn.Linear(4, 2)
    optimizer = grass.GrassAdamW(grass.param_groups(model, 0.5, targets="all-linear"), lr=0.1)
    optimizer.add_param_group({"params": list(head.parameters())})
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    before = head.weight.detach().clone()
    head(model(torch.randn(4, 8))).square().sum().backward()
    optimizer.step()
    assert (head.weight != before).all()
    with pytest.raises(ValueError, match="param"):
        grass.GrassAdamW(model.named_parameters()).add_param_group({"params": list(head.parameters())})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda groups: pickle.loads(pickle.dumps(groups))])
def test_groups_can_be_copied(copied: Callable) -> None:
    """As to pass them to another process; names that the model gave may still be missing from later groups."""
    groups = copied(param_groups(nn.Sequential(nn.Linear(8, 8)), rank=2))
    optimizer = GrassAdamW(groups)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    assert len(optimizer.param_groups) == 3
