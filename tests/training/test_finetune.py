"""scripts/finetune.py end to end on models made on the spot."""

import json
import os
import runpy
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Trainer

from grass.offload import host_storage
from tests.training.runs import without_dropout
from training.data.docstrings import docstrings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NAMES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "finetune.py"))
main = NAMES["main"]
METHODS = {
    "adamw": ["--method", "adamw"],
    "dense": ["--mode", "dense", "--dim", "1"],
    "compact": ["--method", "grass", "--rank", "0.25", "--state-policy", "keep", "--selection", "multinomial_norm"],
    "lora": ["--method", "lora"],
}
SHORT = ["--max-length", "32", "--per-device-train-batch-size", "8", "--disable-tqdm", "True", "--logging-steps", "1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Eighty docstrings as JSON lines, for either kind of task; a number to regress and a class in words."""
    path = tmp_path_factory.mktemp("finetune") / "rows.jsonl"
    rows = [
        {
            "text": item.text,
            "length": len(item.text) / 100,
            "label": "def" if item.signature.startswith("def") else "other",
            "instruction": "Document this.",
            "input": item.signature,
            "output": item.text,
        }
        for item in docstrings()[:80]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--dataset", "json", "--data-files", f"train={path}", "--held-out", "0.2"]


def finetune(kind, out, *flags, steps=6):
    main(
        [
            kind,
            "--model",
            "tiny",
            "--out",
            str(out),
            "--max-steps",
            str(steps),
            "--update-interval",
            "3",
            *SHORT,
            *flags,
        ]
    )
    return pd.read_csv(out / "metrics.csv", index_col="step")


def evaluation(out):
    return json.loads((out / "eval_results.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_classification(tmp_path, files, method, capsys):
    log = finetune("classify", tmp_path, *files, *METHODS[method], "--lr", "1e-3")
    assert log["loss"].notna().sum() == 6
    assert 0 <= evaluation(tmp_path)["eval_accuracy"] <= 1
    assert "state" in capsys.readouterr().out
    if method == "lora":
        model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path)
        changed = [p for name, p in model.named_parameters() if "lora_B" in name]
        assert all(p.any() and p.shape[1] == 16 for p in changed), "the default rank"
    else:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        before = base.state_dict()
        assert all((value != before[name]).any() for name, value in model.state_dict().items())
        assert model.config.id2label == {0: "def", 1: "other"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adamw", "compact", "lora"])
@pytest.mark.parametrize("packed", [[], ["--packed"]], ids=["padded", "packed"])
def test_instruction_tuning(tmp_path, files, method, packed):
    log = finetune("instruct", tmp_path, *files, *METHODS[method], *packed, "--lr", "3e-3", "--max-length", "128")
    assert log["loss"].dropna().tail(2).mean() < log["loss"].dropna().head(2).mean()
    result = evaluation(tmp_path)
    assert result["eval_perplexity"] == pytest.approx(torch.tensor(result["eval_loss"]).exp().item(), rel=1e-4)
    auto = AutoPeftModelForCausalLM if method == "lora" else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("### Instruction\nDocument this.\n\n### Response\n", return_tensors="pt")["input_ids"]
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]


@pytest.mark.slow
def test_a_small_encoder_learns_which_package_a_docstring_is_from(tmp_path):
    flags = [*METHODS["compact"], "--lr", "4e-3", "--per-device-train-batch-size", "32", "--eval-strategy", "no"]
    finetune("classify", tmp_path, *flags, "--update-interval", "10", "--save-strategy", "no", steps=120)
    assert evaluation(tmp_path)["eval_accuracy"] > 0.45  # the most frequent of six packages: 0.21


@pytest.mark.parametrize("method", ["dense", "compact"])
def test_resume_is_bit_exact(tmp_path, files, method):
    flags = [*files, *METHODS[method], "--save-steps", "4", "--save-total-limit", "5"]
    finetune("classify", tmp_path / "whole", *flags, steps=8)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    finetune("classify", tmp_path / "resumed", *flags, "--resume-from-checkpoint", str(checkpoint), steps=8)
    whole, resumed = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "resumed")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, files, number, monkeypatch, capsys):
    flags, step = [*files, *METHODS["compact"], "--save-strategy", "no"], Trainer.training_step
    whole = finetune("classify", tmp_path / "whole", *flags)

    def interrupted(self, *args, **keywords):
        if self.state.global_step == 3:
            os.kill(os.getpid(), number)
        return step(self, *args, **keywords)

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    with pytest.raises(FileNotFoundError):  # no log yet
        finetune("classify", tmp_path / "stopped", *flags)
    monkeypatch.undo()
    checkpoint = tmp_path / "stopped" / "checkpoint-4"
    assert (
        f"Stopped at step 4 of 6: the same command with --resume-from-checkpoint {checkpoint}"
        in capsys.readouterr().out
    )
    resumed = finetune("classify", tmp_path / "stopped", *flags, "--resume-from-checkpoint", str(checkpoint))
    measures = ["loss", "lr", "grass_turnover", "grass_coverage"]
    pd.testing.assert_frame_equal(resumed[measures], whole[measures], check_exact=True)
    first, second = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "stopped")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_of_another_run_is_refused(tmp_path, files, capsys):
    """With another method or other data, encoded otherwise too; settings that change neither are taken."""
    finetune("classify", tmp_path / "first", *files, *METHODS["adamw"], "--save-steps", "2", steps=2)
    going_on = ["--resume-from-checkpoint", str(tmp_path / "first" / "checkpoint-2")]
    for flags, message in (
        ([*files, *METHODS["compact"]], "a run by adamw, this one is by grass, compact mode"),
        ([*files[:-1], "0.3", *METHODS["adamw"]], "on other data: 64 examples then, 56 now"),
        ([*files, *METHODS["adamw"], "--max-length", "16"], "on other data: 64 examples then, 64 now"),
    ):
        with pytest.raises(SystemExit):
            finetune("classify", tmp_path / "second", *flags, *going_on, steps=3)
        assert message in capsys.readouterr().err
    changed = ["--per-device-train-batch-size", "8", "--save-strategy", "no", "--lr", "1e-4"]
    assert len(finetune("classify", tmp_path / "second", *files, *METHODS["adamw"], *changed, *going_on, steps=3)) == 3


def test_a_checkpoint_of_another_model_in_compact_mode_is_refused(tmp_path, files, capsys):
    """What an explicit default says is no other model; a checkpoint that does not say its shapes is taken."""
    compact = [*files, "--method", "grass"]
    finetune("classify", tmp_path / "first", *compact, "--rank", "0.25", "--save-steps", "2", steps=2)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    going_on = ["--resume-from-checkpoint", str(checkpoint)]
    with pytest.raises(SystemExit):
        finetune("classify", tmp_path / "second", *compact, "--rank", "0.5", *going_on, steps=3)
    assert "rank=0.25, explore=0.25, dim=1, weights=None, this one has rank=0.5" in capsys.readouterr().err
    same = ["--rank", "0.25", "--explore", "0.25", "--save-strategy", "no"]
    assert len(finetune("classify", tmp_path / "second", *compact, *same, *going_on, steps=3)) == 3
    said = json.loads((checkpoint / "finetuning.json").read_text())
    (checkpoint / "finetuning.json").write_text(json.dumps({key: said[key] for key in said if key != "shapes"}))
    assert len(finetune("classify", tmp_path / "third", *compact, *same, *going_on, steps=3)) == 3


@pytest.mark.parametrize("kind", ["classify", "instruct"])
def test_accumulated_batches_train_as_one(tmp_path, files, kind):
    """Losses that are means over examples, and those that are sums over tokens."""
    flags = [*files, *METHODS["adamw"], "--save-strategy", "no", "--lr", "1e-4", "--max-length", "64"]
    finetune(kind, tmp_path, *flags, steps=1)
    logs = []
    for size, accumulated in (("8", "1"), ("4", "2")):
        batch = ["--per-device-train-batch-size", size, "--gradient-accumulation-steps", accumulated]
        model = ["--model", str(without_dropout(tmp_path / "base"))]
        logs.append(finetune(kind, tmp_path / size, *flags, *model, *batch, steps=3))
    one, two = (log[["loss", "grad_norm"]].dropna() for log in logs)
    assert len(one) == 3
    pd.testing.assert_frame_equal(one, two, rtol=1e-4)  # float32, sums in another order


@pytest.mark.slow
def test_regression(tmp_path, files):
    finetune("classify", tmp_path, *files, "--label", "length", "--columns", "text", "input")
    assert {"eval_pearson", "eval_spearman"} <= evaluation(tmp_path).keys()


def test_trainer_flags_reach_the_trainer(tmp_path, files):
    log = finetune(
        "classify", tmp_path, *files, "--lr", "0.5", "--warmup-steps", "2", "--gradient-accumulation-steps", "2"
    )
    assert log["lr"].dropna().tolist()[:3] == [0, 0.25, 0.5]
    assert evaluation(tmp_path)["epoch"] == pytest.approx(6 * 16 / 64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "lora", "--rank", "0.25"], "Invalid rank=0.25 for lora: must be an integer"),
        (["--weights", "int8"], "--weights does nothing here"),
        (["--method", "adamw", "--mode", "compact"], "Invalid compact mode with adamw"),
        (["--rank", "0"], "rank=0: must be an integer >= 1"),
        (["--number-of-epochs", "3"], r"not used by the HfArgumentParser: ['--number-of-epochs', '3']"),
        (["--task", "glue"], "argument --task: invalid choice: 'glue'"),
        (["--data-files", "x.json"], "must be SPLIT=GLOB"),
        (["--num-train-epochs", "many"], "invalid float value: 'many'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_flags(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        finetune("classify", tmp_path, *flags)
    assert exit_.value.code == 2
    written = capsys.readouterr().err
    assert message in written
    assert "usage" not in written


@pytest.mark.parametrize("method", ["adamw", "lora"])
def test_offload_is_refused_where_it_does_nothing(tmp_path, files, method, capsys):
    with pytest.raises(SystemExit):
        finetune("classify", tmp_path, *files, *METHODS[method], "--offload")
    assert f"--offload does nothing with --method {method}" in capsys.readouterr().err


@pytest.mark.slow
def test_offload_trains_as_without(tmp_path, files, capsys):
    logs = []
    for flags in ([], ["--offload"]):
        log = finetune("classify", tmp_path / str(len(flags)), *files, *METHODS["compact"], *flags, steps=4)
        logs.append(log["loss"].dropna().tolist())
        held = capsys.readouterr().out.rpartition("state ")[2]
        assert held.startswith("0 bytes") == bool(flags)
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_streamed_trains_as_checkpointed(tmp_path, files, capsys):
    logs = []
    for flags in (["--gradient-checkpointing"], ["--offload", "--stream"]):
        log = finetune("classify", tmp_path / str(len(flags)), *files, *METHODS["compact"], *flags, steps=4)
        logs.append(log[["loss", "grass_turnover", "grass_coverage"]].dropna().values.tolist())
    assert len(logs[0]) == 4
    assert logs[0] == logs[1]


def test_streaming_is_refused_with_adamw(tmp_path, files, capsys):
    with pytest.raises(SystemExit):
        finetune("classify", tmp_path, *files, *METHODS["adamw"], "--stream")
    assert "--stream is for --method grass" in capsys.readouterr().err


def test_save_steps_alone_save_by_steps(tmp_path):
    arguments = training_arguments(["--save-steps", "2", "--eval_steps=3"], tmp_path)
    assert (arguments.save_strategy, arguments.save_steps) == ("steps", 2)
    assert (arguments.eval_strategy, arguments.eval_steps) == ("steps", 3)
    assert training_arguments([], tmp_path).save_strategy == "epoch"
    with pytest.raises(ValueError, match="--save-steps does nothing with --save-strategy epoch"):
        training_arguments(["--save-steps", "2", "--save-strategy", "epoch"], tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["classify", "--packed"], "--packed does nothing with classify without --dataset"),
        (["classify", "--label", "stars"], "--label does nothing with classify without --dataset"),
        (["classify", "--dataset", "csv", "--task", "sst2"], "--task does nothing with classify with --dataset"),
        (["classify", "--subset", "en"], "--subset does nothing with classify without --dataset"),
        (["instruct", "--columns", "a", "b"], "--columns does nothing with instruct without --dataset"),
        (["classify", "--learning-rate", "1e-4"], "--learning-rate is set by --lr"),
        (["classify", "--adam_beta2", "0.9"], "--adam-beta2 is set by --betas"),
        (["classify", "--output-dir", "elsewhere"], "--output-dir is set by --out"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*flags, "--model", "tiny", "--lr", "1e-3", "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_state_in_files_trains_as_without(tmp_path, files, monkeypatch):
    monkeypatch.setattr(host_storage, "SMALLEST", 1)  # these tensors are small
    logs = []
    for flags in ([], ["--offload", "--offload-path", str(tmp_path / "state"), "--stream"]):
        run = [*files, *METHODS["compact"], *flags, *([] if flags else ["--gradient-checkpointing"])]
        logs.append(finetune("classify", tmp_path / str(len(flags)), *run, steps=4)["loss"].dropna().tolist())
    assert logs[0] == logs[1]
    assert (tmp_path / "state").is_dir()  # its files have no names


def training_arguments(flags, out):
    arguments = NAMES["argument_parser"]().parse_args(["classify", "--model", "tiny", "--out", str(out)])
    return NAMES["training_arguments"](arguments, flags)


@pytest.mark.parametrize("left", ["metrics.csv", "model.safetensors", "checkpoint-4"])
def test_a_directory_with_a_run_is_refused(tmp_path, left, capsys):
    (tmp_path / left).write_text("mine")
    with pytest.raises(SystemExit):
        main(["classify", "--model", "tiny", "--out", str(tmp_path)])
    assert "already holds a run: choose another --out" in capsys.readouterr().err
    assert (tmp_path / left).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [left]
    resumed = training_arguments(["--resume-from-checkpoint", str(tmp_path / "checkpoint-4")], tmp_path)
    NAMES["check_new"](tmp_path, resumed)
