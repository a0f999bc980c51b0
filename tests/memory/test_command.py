"""The command line: what it prints, and what it refuses."""

import copy
import importlib.metadata
import json
import re
import runpy
import sys

import pytest

from grass.memory import METHODS
from grass.memory.__main__ import main
from tests.memory.architectures import CAPPED, KINDS

SOME = ["AdamW", "8-bit AdamW", "LoRA", "GaLore", "Grass", "Grass int8"]
CONFIGURATIONS = {
    "bert": {"model_type": "bert"},
    "width": {"model_type": "llama", "hidden_size": "wide"},
    "heads": {"model_type": "llama", "num_attention_heads": 0},
    "unknown": {"model_type": "unknown"},
    "broken": "{",
}
SHOWN = ["--model", "13b", "--rank", "192", "--seq", "2048", "--batch", "1", "--gpu", "40GB"]


TABLES = {}


def table(capsys, *arguments):
    """Rows of the printed table by their labels: the columns of :data:`SOME` methods. Equal calls are made once."""
    if arguments not in TABLES:
        main(arguments)
        lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
        columns = [1 + list(METHODS).index(method) for method in SOME]
        TABLES[arguments] = {line[0]: [line[i] for i in columns] for line in lines if len(line) == len(METHODS) + 1}
    return TABLES[arguments]


def test_the_commands_own_example(capsys):
    rows = table(capsys, *SHOWN)
    assert rows["fits 40.00 GB"] == ["no", "no", "yes", "no", "yes", "yes"]
    assert rows["weights"] == ["26.03"] * 5 + ["13.35"]
    assert rows["total"][4] == "38.77"
    labels = "active rows, adapters|gradients|moments|activations, checkpointed|logits and loss|workspace|bank on host"
    assert set(labels.split("|")) < rows.keys()
    assert any(label.startswith("allocator slack") for label in rows)
    assert int(rows["largest rank"][4]) >= 192
    assert rows["largest rank"][:2] == ["-", "-"]


def test_options_reach_the_plan(capsys):
    plain = table(capsys, *SHOWN)
    other = table(
        capsys, *SHOWN, "--no-checkpointing", "--chunked-loss", "0", "--moment-dtype", "8bit", "--state-policy", "bank"
    )
    assert other["activations, all saved"] == plain["(activations, all saved)"]
    assert float(other["moments"][4]) < float(plain["moments"][4])
    assert float(other["bank on host"][4]) > 100
    assert other["fits 40.00 GB"] == ["no"] * 5 + ["yes"]


def test_exploring_and_rules_reach_the_plan(capsys):
    plain, none, sketched = (
        table(capsys, *SHOWN[:-2], *more) for more in ([], ["--explore", "0"], ["--selection", "multinomial_norm"])
    )
    assert float(none["gradients"][4]) < float(plain["gradients"][4])
    assert none["moments"] == plain["moments"]
    assert float(sketched["workspace"][4]) > float(plain["workspace"][4])
    main([*SHOWN[:-2], "--explore", "0.125"])
    assert "Grass: 0.125 explored, selection uniform, policy keep" in capsys.readouterr().out


@pytest.mark.slow
def test_the_rank_of_adapters_is_their_own(capsys):
    plain, wider = table(capsys, *SHOWN), table(capsys, *SHOWN, "--lora-rank", "64")
    for label, cells in plain.items():
        for method, ours, theirs in zip(SOME, cells, wider[label], strict=True):
            if label == "active rows, adapters" and method == "LoRA":
                assert float(theirs) == pytest.approx(4 * float(ours), rel=0.05)
            elif method != "LoRA":
                assert ours == theirs


def test_offload_reaches_the_plan(capsys):
    plain, offloaded = table(capsys, *SHOWN), table(capsys, *SHOWN, "--offload")
    assert [offloaded["moments"][column] for column in (0, 4)] == ["-", "-"]
    for column in (0, 4):
        on_host = float(offloaded["moments on host"][column])
        assert on_host == pytest.approx(float(plain["moments"][column]), abs=0.011)  # masters of norms; rounded
    assert offloaded["total"][1:4] == plain["total"][1:4]
    assert offloaded["total on host"][1:4] == ["-"] * 3
    assert float(offloaded["total"][4]) < float(plain["total"][4])
    assert "moments on host" not in plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_file(capsys, tmp_path, kind):
    KINDS[kind].save_pretrained(tmp_path)
    options = ["--rank", "32", "--seq", "512", "--chunked-loss", "0"]
    by_directory = table(capsys, "--model", str(tmp_path), *options)
    assert by_directory == table(capsys, "--model", str(tmp_path / "config.json"), *options)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_suit_every_model(capsys, tmp_path, kind):
    """A default that the model does not allow is lowered, with a line that names the flag."""
    config = copy.deepcopy(KINDS[kind])
    if kind == "gpt-neox":
        config.hidden_size, config.num_attention_heads = 64, 4  # narrower than the default rank
    config.save_pretrained(tmp_path)
    lowered = {
        "gpt2": ["--seq 1024 instead of 2048: this model learns 1,024 positions"],
        CAPPED: ["--chunked-loss 0 instead of 256: this model's loss cannot be chunked"],
        "gpt-neox": ["--rank 64 instead of 256: this model's narrowest layer allows no more"],
    }
    main(["--model", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if " instead of " in line] == lowered.get(kind, [])
    assert any(line.startswith("total") for line in lines)


@pytest.mark.parametrize(
    ("kind", "flag", "reason"),
    [
        ("gpt2", ["--seq", "2048"], "Invalid --seq=2048: must be at most 1024"),
        (CAPPED, ["--chunked-loss", "256"], "Invalid --chunked-loss=256: this model does more to its logits"),
    ],
)
def test_given_values_are_refused_by_their_flag(capsys, tmp_path, kind, flag, reason):
    KINDS[kind].save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--rank", "32", *flag])
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1, "no usage before it"


def test_sizes_in_any_case(capsys):
    assert table(capsys, "--model", "1M", "--rank", "8") == table(capsys, "--model", "1m", "--rank", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offload", "--host", "10MB"], "--host is compared with what fits a --gpu: add it"),
        (["--devices", "3"], "--devices are those of a --sweep: add it, or say --gpus"),
        (["--bank-dtype", "bfloat16"], "--bank-dtype is of --state-policy bank, not of keep"),
        (["--gpu", "40"], "Invalid size '40': must be a number with one of the units GB, GiB"),
        (["--lora-rank", "0"], "lora_rank=0: must be >= 1"),
        (["--dtype", "float32", "--active-dtype", "bfloat16"], "must be torch.float32, or that of the weights"),
        (["--model", "30b-a3b", "--moment-dtype", "8bit"], "does not take experts, so must be 'float32' or 'bfloat16'"),
        (["--model", "30b-a3b", "--dtype", "float32"], "models with experts are planned in torch.bfloat16 only"),
        (["--rank", "9999"], "rank=9999: must be at most 5120"),
        (["--explore", "5000"], "Invalid --explore=5000: must be a fraction, or at most 4864 for this model"),
        (["--batch", "0"], "Invalid --batch=0: must be >= 1"),
        (["--state-policy", "forget"], "invalid choice: 'forget'"),
        (["--model", "{tmp}/missing.json"], "must be one of 1m, 9m"),
        (["--model", "13bb"], "No model '13bb': did you mean 13b?"),
        (["--model", "{tmp}"], "Invalid configuration"),
        (["--model", "{tmp}/bert.json"], "model_type='bert': an encoder"),
        (["--model", "{tmp}/width.json"], "hidden_size='wide' must be an integer >= 1"),
        (["--model", "{tmp}/heads.json"], "num_attention_heads=0 must be an integer >= 1"),
        (["--model", "{tmp}/broken.json"], "Invalid configuration"),
        (["--model", "{tmp}/unknown.json"], "model type `unknown`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, fields in CONFIGURATIONS.items():
        (tmp_path / f"{name}.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    with pytest.raises(SystemExit) as exit_:
        main(["--model", "13b", *(a.format(tmp=tmp_path) for a in arguments)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_both_ways_to_call_it(capsys, monkeypatch):
    (script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "grass-memory"]
    script.load()(SHOWN)
    printed = capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "grass.memory.__main__")  # which runpy would warn of
    monkeypatch.setattr(sys, "argv", ["grass-memory", *SHOWN])
    runpy.run_module("grass.memory", run_name="__main__")
    assert capsys.readouterr().out == printed


def test_it_says_what_scale_makes_of_the_rate(capsys):
    for rank, said in (("0.125", "4"), ("256", "8 to 21.5")):  # integers: another share of each layer's columns
        main(["--model", "7b", "--rank", rank])
        assert f"linear layers train at {said} times AdamW's learning rate (scale='auto')" in capsys.readouterr().out
