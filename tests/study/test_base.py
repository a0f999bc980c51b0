import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import sleep

import base as module
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.data.docstrings import PACKAGES
from training.run.loop import Trainer


def test_files_of_the_tasks_are_left_out():
    files = module.other_files()
    assert len(files) > 200
    assert all(Path(file).is_file() for file in files)
    assert {"argparse.py", "dataclasses.py"} <= {Path(file).name for file in files}
    assert not set(PACKAGES) & {part for file in files for part in Path(file).parts}


def test_a_base_is_a_trained_model_with_its_tokenizer(base):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    ids = tokenizer("def first(self):\n    return self.items[0]\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < torch.tensor(len(tokenizer)).log() - 0.3


@pytest.mark.slow
def test_the_same_every_time(base, base_files, tmp_path):
    again = module.ensure_base(tmp_path / "base", steps=10, files=base_files, autocast=False)
    assert again == tmp_path / "base"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.slow
def test_a_signal_leaves_none(base_files, tmp_path, monkeypatch):
    class Stopped(Trainer):
        def train_step(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().train_step()

    monkeypatch.setattr(module, "Trainer", Stopped)
    with pytest.raises(SystemExit, match="Stopped before the base model was trained"):
        module.ensure_base(tmp_path / "base", steps=10, files=base_files)
    assert not (tmp_path / "base").exists()


@pytest.fixture
def made(monkeypatch):
    """How often a base was begun; the first time, it breaks off."""
    begun = []

    def pretrain(out, steps, files, autocast):
        out.mkdir()
        begun.append(len(begun))
        (out / f"part-{begun[-1]}").touch()
        sleep(0.2)
        if begun[-1] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_pretrain", pretrain)
    return begun


def test_what_was_broken_off_is_begun_anew(made, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        module.ensure_base(tmp_path / "base", files=[])
    assert not (tmp_path / "base").exists()
    module.ensure_base(tmp_path / "base", files=[])
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["part-1"]


def test_two_at_once_make_one(made, tmp_path):
    made.append(0)
    with ThreadPoolExecutor(2) as pool:
        make = partial(module.ensure_base, files=[])
        assert set(pool.map(make, [tmp_path / "base"] * 2)) == {tmp_path / "base"}
    assert made == [0, 1]
