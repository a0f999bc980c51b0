import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM

from tests.training.every_optimizer import EVERY
from tests.training.runs import PRETRAIN, TINY

EXACT = ["loss", "eval_loss", "lr"]
"""Logged columns that tell whether two runs have the same weights."""

main = runpy.run_path(str(PRETRAIN))["main"]


def pretrain(out, *flags):
    main(["--out", str(out), *TINY, "--steps", "6", "--eval-every", "3", *flags])
    return pd.read_csv(out / "metrics.csv", index_col="step")


@pytest.mark.filterwarnings("ignore:No checkpoints will be saved")
@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("autocast", marks=pytest.mark.slow)])
def test_every_optimizer_and_dtype_runs(tmp_path, optimizer, dtype):
    log = pretrain(tmp_path, "--optimizer", optimizer, "--dtype", dtype, "--update-interval", "3")
    assert list(log.index) == [1, 2, 3, 4, 5, 6]
    assert log["loss"].between(3, 7).all()
    assert list(log["eval_loss"].dropna().index) == [3, 6]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)


def test_learning_rate_warms_up_and_decays(tmp_path):
    log = pretrain(tmp_path, "--lr", "0.5", "--steps", "10", "--clip", "0", "--optimizer", "adamw")
    assert log["lr"].tolist()[:3] == [0, 0.25, 0.5]
    assert log["lr"].iloc[2:].is_monotonic_decreasing
    assert 0.05 < log["lr"].iloc[-1] < 0.08


def test_learning_rate_ends_where_it_was_asked_to(tmp_path):
    log = pretrain(tmp_path, "--lr", "0.5", "--steps", "10", "--final-lr", "0", "--optimizer", "adamw")
    assert 0 < log["lr"].iloc[-1] < 0.03


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    large = pretrain(tmp_path / "large", "--optimizer", "adamw", "--batch-size", "4")
    small = pretrain(tmp_path / "small", "--optimizer", "adamw", "--batch-size", "2", "--accumulate", "2")
    columns = ["tokens", "loss", "eval_loss", "grad_norm", "lr"]
    pd.testing.assert_frame_equal(small[columns], large[columns], rtol=1e-4)


def test_clipping_changes_the_run_and_not_the_reported_norm(tmp_path):
    free = pretrain(tmp_path / "free", "--clip", "0", "--optimizer", "grass", "--update-interval", "2")
    clipped = pretrain(tmp_path / "clipped", "--clip", "0.01", "--optimizer", "grass", "--update-interval", "2")
    assert clipped["grad_norm"].iloc[0] == free["grad_norm"].iloc[0] > 0.01
    assert clipped["loss"].iloc[-1] != free["loss"].iloc[-1]


def test_stepping_in_backward_gives_the_same_run_and_resumes(tmp_path):
    flags = ["--mode", "dense", "--clip", "0", "--explore", "0.25", "--update-interval", "2"]
    ordinary = pretrain(tmp_path / "ordinary", *flags)
    assert pretrain(tmp_path / "ours", *flags, "--step-in-backward")[EXACT].equals(ordinary[EXACT])
    pretrain(tmp_path / "parts", *flags, "--step-in-backward", "--save-every", "3")
    (tmp_path / "parts" / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    resumed = pretrain(tmp_path / "parts", *flags, "--step-in-backward", "--save-every", "3", "--resume")
    assert resumed[EXACT].equals(ordinary[EXACT])
    pd.testing.assert_series_equal(resumed["grad_norm"], ordinary["grad_norm"], rtol=1e-5)  # summed in another order


def test_stepping_in_backward_clips_each_parameter(tmp_path):
    flags = ["--mode", "dense", "--step-in-backward", "--update-interval", "2", "--clip"]
    free, clipped = (pretrain(tmp_path / clip, *flags, clip) for clip in ("0", "0.01"))
    assert clipped["grad_norm"].iloc[0] == free["grad_norm"].iloc[0] > 0.01
    assert clipped["loss"].iloc[-1] != free["loss"].iloc[-1]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--optimizer", "adamw"], marks=pytest.mark.slow),
        pytest.param(["--optimizer", "grass"], marks=pytest.mark.slow),
        pytest.param(["--optimizer", "grass", "--dtype", "bf16"], marks=pytest.mark.slow),
        ["--selection", "multinomial_norm", "--state-policy", "bank", "--accumulate", "2"],
    ],
    ids=" ".join,
)
def test_offloaded_and_resident_runs_are_one_and_go_on_as_each_other(tmp_path, flags, capsys):
    flags = [*flags, "--update-interval", "3"]
    resident = pretrain(tmp_path / "resident", *flags, "--save-every", "4")
    state = capsys.readouterr().out
    offloaded = pretrain(tmp_path / "offloaded", *flags, "--save-every", "4", "--offload")
    assert offloaded[[*EXACT, "grad_norm"]].equals(resident[[*EXACT, "grad_norm"]])
    assert " on the host 0" not in capsys.readouterr().out
    assert "state 0 bytes" not in state
    weights = load_file(tmp_path / "resident" / "model" / "model.safetensors")
    for name, other in (("resident", ["--offload"]), ("offloaded", [])):
        (tmp_path / name / "checkpoints" / "step-00000006" / "manifest.json").unlink()
        assert pretrain(tmp_path / name, *flags, *other, "--resume")[EXACT].equals(resident[EXACT])
        found = load_file(tmp_path / name / "model" / "model.safetensors")
        assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_tensorboard_has_the_same_numbers(tmp_path):
    log = pretrain(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(log.index)
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(log["loss"].tolist())
    assert [event.value for event in events.Scalars("eval_loss")] == pytest.approx(log["eval_loss"].dropna().tolist())


def test_streamed_dataset_is_killed_and_resumed(tmp_path, json_files, tokenizer_path):
    flags = ["--dataset", "json", "--tokenizer", tokenizer_path, "--data-files"]
    flags += [f"{split}={path}" for split, path in json_files.items()]
    alone = pretrain(tmp_path / "alone", *flags, "--steps", "9")
    pretrain(tmp_path / "parts", *flags, "--steps", "9", "--save-every", "4", "--keep", "3")
    (tmp_path / "parts" / "checkpoints" / "step-00000009" / "manifest.json").unlink()
    resumed = pretrain(tmp_path / "parts", *flags, "--steps", "9", "--save-every", "4", "--resume")
    pd.testing.assert_frame_equal(
        resumed.drop(columns="tokens_per_second"), alone.drop(columns="tokens_per_second"), check_exact=True
    )


def test_a_run_can_be_extended_but_not_changed(tmp_path, capsys):
    pretrain(tmp_path / "run", "--steps", "4")
    extended = pretrain(tmp_path / "run", "--steps", "6", "--resume")
    assert list(extended.index) == [1, 2, 3, 4, 5, 6]
    assert "Resumed at step 4" in capsys.readouterr().out
    rates = pretrain(tmp_path / "whole", "--steps", "6")["lr"]
    assert extended["lr"][4:].equals(rates[4:]), "the new schedule's from the first step on"
    assert not extended["lr"][:4].equals(rates[:4])
    with pytest.raises(SystemExit):
        pretrain(tmp_path / "run", "--resume", "--lr", "0.5")
    assert "made with {'lr': 0.001}, not with {'lr': 0.5}" in capsys.readouterr().err


def test_a_longer_run_does_not_warm_up_again(tmp_path):
    place = TINY.index("--warmup")
    by_default = [*TINY[:place], *TINY[place + 2 :], "--out", str(tmp_path)]
    main([*by_default, "--steps", "10"])
    main([*by_default, "--steps", "40", "--resume"])
    extended = pd.read_csv(tmp_path / "metrics.csv", index_col="step")["lr"]
    with_the_same = pretrain(tmp_path / "whole", "--steps", "40", "--warmup", "1")["lr"]
    assert extended[10:].equals(with_the_same[10:]), "a tenth of the ten steps that it began with"


def test_a_finished_run_resumes_to_nothing(tmp_path):
    log = pretrain(tmp_path)
    pd.testing.assert_frame_equal(pretrain(tmp_path, "--resume"), log)


def test_resume_without_a_checkpoint_starts(tmp_path):
    assert len(pretrain(tmp_path, "--resume")) == 6


def test_resume_with_all_checkpoints_damaged_is_an_error(tmp_path, capsys):
    pretrain(tmp_path)
    for file in tmp_path.glob("checkpoints/*/state.pt"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SystemExit):
        pretrain(tmp_path, "--resume")
    assert "step-00000006 (state.pt has " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain(tmp_path)
    assert "already holds a run" in capsys.readouterr().err


def test_a_run_is_not_overwritten(tmp_path, capsys):
    pretrain(tmp_path)
    with pytest.raises(SystemExit):
        pretrain(tmp_path)
    assert "already holds a run: continue it with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain(tmp_path, "--optimizer", "galore")
    assert "already holds a run" in capsys.readouterr().err


def test_8_bit_moments_are_not_sharded(tmp_path, monkeypatch, capsys):
    """Said before anything is built."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(SystemExit):
        pretrain(tmp_path, "--fsdp", "--moment-dtype", "8bit")
    assert "--moment-dtype 8bit cannot be sharded" in capsys.readouterr().err


def test_fewer_steps_than_the_checkpoint_has(tmp_path, capsys):
    pretrain(tmp_path)
    with pytest.raises(SystemExit):
        pretrain(tmp_path, "--resume", "--steps", "3")
    assert "Invalid --steps 3" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("adamw8bit", marks=pytest.mark.slow)])
def test_peers_whose_states_are_tensors_resume_bit_for_bit(tmp_path, optimizer):
    flags = ["--optimizer", optimizer, "--save-every", "3", "--keep", "2"]
    pretrain(tmp_path, *flags)
    expected = (tmp_path / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    pretrain(tmp_path, *flags, "--resume")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("optimizer", ["galore", "apollo"])
def test_peers_cannot_be_resumed_and_say_so(tmp_path, optimizer, capsys):
    with pytest.warns(UserWarning, match=f"the state of {optimizer} holds pickled objects"):
        pretrain(tmp_path, "--optimizer", optimizer)
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(SystemExit):
        pretrain(tmp_path, "--optimizer", optimizer, "--resume")
    assert "Cannot --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "steps=0: must be >= 1"),
        (["--warmup", "6"], "warmup=6: must be in [0, steps=6)"),
        (["--final-lr", "2"], "final_lr=2.0: must be in [0, 1], a share of the peak"),
        (["--accumulate", "0"], "accumulate=0: must be >= 1"),
        (["--clip", "-1"], "clip=-1.0: must be >= 0"),
        (["--step-in-backward", "--accumulate", "2"], "accumulate=2: must be 1 with step_in_backward=True"),
        (["--step-in-backward", "--optimizer", "adamw"], "step_in_backward=True takes grass's optimizer, got AdamW"),
        (["--step-in-backward"], "--step-in-backward takes dense mode, --mode dense"),
        (["--offload", "--optimizer", "galore"], "offload=True with name=galore: must be one of adamw, grass"),
        (
            ["--mode", "dense", "--offload", "--step-in-backward"],
            "step_in_backward takes an optimizer whose state is on the device",
        ),
        (["--replacement"], "draws without replacement. Others take --mode dense"),
        (["--mode", "compact", "--optimizer", "adamw"], "Invalid compact mode with adamw"),
        (["--rank", "0"], "rank=0: must be an integer >= 1"),
        (["--rank", "1.25"], "rank=1.25: must be an integer >= 1 or a fraction in (0, 1]"),
        (["--batch-size", "0"], "batch_size=0: must be >= 1"),
        (["--keep", "0"], "keep=0: must be >= 1"),
        (["--dataset", "allenai/c4"], "dataset='allenai/c4' needs a tokenizer"),
        (["--data-files", "x.jsonl"], "must be SPLIT=GLOB"),
        (["--dim", "2"], "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_flags(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        pretrain(tmp_path, *flags)
    assert exit_.value.code == 2
    written = capsys.readouterr().err
    assert message in written
    assert "--out" not in written, "no usage before it"


def test_package_does_not_need_transformers():
    absent = "sys.modules |= dict.fromkeys(['transformers', 'datasets', 'triton'])"
    code = f"import sys; {absent}; import grass; grass.GrassAdamW"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_demo_smoke(tmp_path):
    demo = Path(PRETRAIN).with_name("demo.py")
    command = [sys.executable, str(demo), "--smoke", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    number = r"([\d.,]+)"
    rows = re.findall(rf"^(AdamW|Grass|Grass compact) +{' +'.join([number] * 5)}$", done.stdout, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["AdamW", "Grass", "Grass compact"]
    state, gradients = ([int(row[column].replace(",", "")) for row in rows] for column in (3, 5))
    assert max(state[1:]) < 0.5 * state[0]
    assert gradients[0] == gradients[1] > 1.8 * gradients[2]  # half of the columns, and embeddings and head
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")
