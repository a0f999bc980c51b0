"""``python -m grass.sweep``: the search, its trial, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import grass
from grass.sweep.__main__ import main
from grass.sweep.bracket import FURTHEST, best_point, next_points
from grass.sweep.language import LanguageModel

TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(400))
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    tie_word_embeddings=False,
)


@pytest.fixture
def model(tmp_path) -> Path:
    """A directory with a configuration only."""
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def trial(model, text) -> LanguageModel:
    return LanguageModel(str(model), (str(text),), steps=20, scratch=True, batch_size=2, seq_len=32)


def found(loss, bound=200):
    """The best point of a search, and the number of points."""
    losses = {}
    while points := next_points(losses):
        assert not losses.keys() & set(points)
        losses |= {point: loss(*point) for point in points}
        assert len(losses) < bound
    return best_point(losses), len(losses)


@pytest.mark.parametrize("target", [(0, 0), (1, 0), (3, -2), (-4, 3)])
def test_a_search_ends_at_the_best_point(target) -> None:
    """The oracle is the whole grid, which takes more than three times as many runs."""

    def loss(a, b):
        return (a - target[0]) ** 2 + 0.5 * (b - target[1]) ** 2 + 0.3 * (a - target[0]) * (b - target[1])

    reach = range(-5, 6)
    assert min(((a, b) for a in reach for b in reach), key=lambda point: loss(*point)) == target
    best, count = found(loss)
    assert best == target
    assert count < 11**2 / 3


def test_a_search_leaves_rates_that_diverge() -> None:
    best, _ = found(lambda a, b: math.inf if max(a, b) > -3 else (a + 4) ** 2 + (b + 5) ** 2)
    assert best == (-4, -5)


@pytest.mark.parametrize("loss", [lambda a, b: -a - b, lambda a, b: math.inf])
def test_a_search_without_a_best_point_says_so(loss) -> None:
    with pytest.raises(ValueError, match=f"No best rates within {FURTHEST} halvings"):
        found(loss)


def test_a_point_level_with_its_neighbours_ends_the_search() -> None:
    assert found(lambda a, b: 1.0) == ((0, 0), 5)


def test_a_flat_valley_is_not_followed() -> None:
    assert found(lambda a, b: 1.0 + 1e-4 * b) == ((0, 0), 5)


@pytest.mark.parametrize("dense", [False, True])
def test_its_trial_equals_a_loop_by_hand(trial, tmp_path, dense) -> None:
    trial = replace(trial, dense=dense, explore=0.125)
    torch.manual_seed(99)  # the trial has random numbers of its own
    pairs = list(trial(4e-3, 0.5, folder=tmp_path, device="cpu"))
    assert [step for step, _ in pairs] == list(range(2, 21, 2))

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    if dense:
        optimizer = grass.GrassAdamW(grass.param_groups(model, rank=0.25, explore=0.125), lr=4e-3, scale=0.5)
    else:
        grass.compact(model, rank=0.25, explore=0.125)
        optimizer = grass.GrassAdamW(model, lr=4e-3, scale=0.5)
    ids = torch.tensor(list(TEXT.encode()))
    windows = ids[: len(ids) // 32 * 32].view(-1, 32)
    heldout = len(windows) // 10
    draws = torch.Generator().manual_seed(0)
    for step in range(20):
        batch = windows[:-heldout][torch.randint(len(windows) - heldout, (2,), generator=draws)]
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = (step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 18))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate
        optimizer.step()
        optimizer.zero_grad()
    logits = model(windows[-heldout:]).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), windows[-heldout:, 1:].flatten())
    assert pairs[-1][1] == pytest.approx(expected.item(), rel=1e-4)  # float32, sums in another order


def test_its_lines_train(trial) -> None:
    for dense in (False, True):
        model = AutoModelForCausalLM.from_config(CONFIG)
        scope = {"grass": grass, "model": model}
        exec(replace(trial, dense=dense).lines(0.004, 0.5), scope)
        group = scope["optimizer"].param_groups[0]
        assert (group["lr"], group["scale"], group["seed"]) == (0.004, 0.5, 0)
    for every in (replace(trial, explore=1.0), replace(trial, rank=1.0)):
        scope = {"grass": grass, "model": AutoModelForCausalLM.from_config(CONFIG)}
        exec(every.lines(0.004, 0.5), scope)
        layers = [layer for layer in scope["model"].modules() if hasattr(layer, "chosen")]
        assert layers
        assert all(len(layer.chosen) == layer.in_features for layer in layers), "all columns, not one"


def test_an_interrupt_says_how_to_go_on(model, text, tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grass.sweep.__main__.run", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(model), "--data", str(text), "--scratch", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 130
    assert f"the same command goes on with what {tmp_path / 'out'} holds" in capsys.readouterr().err


@pytest.mark.parametrize("dense", [False, True])
def test_a_seed_decides_the_rows_and_its_lines_have_it(trial, dense) -> None:
    """The same rows, at first and after a refresh, for the lines as for the trial, and others for another seed."""

    def rows(model, optimizer) -> list[list[int]]:
        found = []
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(CONFIG.vocab_size, (1, 8))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([state["indices"].tolist() for state in optimizer.state.values() if "indices" in state])
        return found

    found = {}
    for seed in (0, 3):
        every = replace(trial, dense=dense, explore=None, seed=seed)
        scope = {"grass": grass, "model": every.load()}
        exec(every.lines(0.004, 0.5), scope)
        model = every.load()
        optimizer = every.optimizer(model, 0.004, 0.5)
        for each in (optimizer, scope["optimizer"]):
            each.param_groups[0]["update_interval"] = 2
        found[seed] = rows(model, optimizer)
        assert rows(scope["model"], scope["optimizer"]) == found[seed]
    assert all(one != other for one, other in zip(found[0], found[3], strict=True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2.0),
        ({"rank": 0.125, "explore": 0.375}, 2.0),
        ({"rank": 0.5, "explore": 0.5}, 1.0),
        ({"explore": 0.0}, 1.0),
        ({"dense": True}, 1.0),
        ({"dense": True, "explore": 0.25}, 2.0),
    ],
)
def test_it_starts_from_the_automatic_scale(trial, changes, expected) -> None:
    """A step at that scale equals one with ``scale="auto"``."""
    trial = replace(trial, **changes)
    assert trial.auto_scale() == expected
    after = []
    for scale in (expected, "auto"):
        model = trial.load()
        optimizer = trial.optimizer(model, 4e-3, scale)
        ids = torch.arange(64).view(2, 32)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        after.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_pretrained_weights_are_used_unless_from_scratch(trial, tmp_path) -> None:
    torch.manual_seed(5)
    pretrained = AutoModelForCausalLM.from_config(CONFIG)
    pretrained.save_pretrained(tmp_path / "model")
    weight = pretrained.lm_head.weight
    assert torch.equal(replace(trial, scratch=False).load().lm_head.weight, weight)
    assert not torch.equal(trial.load().lm_head.weight, weight)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_the_command_brackets_the_best_rates(model, text, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    flags = ["--model", str(model), "--data", str(text), "--scratch", "--out", str(out), "--lr", "0.032"]
    flags += ["--steps", "10", "--batch-size", "2", "--seq-len", "32", "--devices", "cpu:0", "cpu:1"]
    main(flags)
    printed = capsys.readouterr().out
    rows = [tuple(map(float, re.findall(r"[\d.]+", row)[:4])) for row in re.findall(r"^. +[\d.].*done$", printed, re.M)]
    losses = {(lr, rate): loss for lr, _, rate, loss in rows}
    (lr, scale, _, best), *others = rows
    assert best == min(losses.values())
    for a, b in ((0.5, 1), (2, 1), (1, 0.5), (1, 2)):
        neighbours = [at for at in losses if at == pytest.approx((lr * a, lr * scale * b), rel=1e-3)]
        assert len(neighbours) == 1
    assert (
        f"grass.compact(model, rank=0.25)\noptimizer = grass.GrassAdamW(model, lr={lr:g}, scale={scale:g})" in printed
    )
    assert (out / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(out.glob("*.jsonl"))) == len(rows) == len(others) + 1
    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    main(flags)
    assert capsys.readouterr().out == printed
    assert {path: path.read_bytes() for path in out.glob("*.jsonl")} == before


@pytest.mark.usefixtures("fast")
def test_a_run_that_fails_ends_the_command(model, text, tmp_path, capsys) -> None:
    flags = ["--model", str(model), "--data", str(text), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):  # no weights are there, and --scratch is not given
        main([*flags, "--steps", "2", "--seq-len", "32", "--devices", "cpu:0", "cpu:1"])
    assert re.search(r"error: lr=0.0001, scale=2: OSError: .*\(logs are in ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "Invalid --steps 0: must be >= 1"),
        (["--seq-len", "0"], "Invalid --seq-len 0: must be >= 1"),
        (["--rank", "1.5"], r"Invalid --rank 1.5: must be a fraction in \(0, 1\]"),
        (["--explore", "-1"], r"Invalid --explore -1.0: must be a fraction in \[0, 1\]"),
        (["--lr", "0"], "Invalid --lr 0.0: must be a finite number > 0"),
        (["--behind", "-1"], "Invalid margin=-1.0"),
        (["--devices", "warp:1"], "Unknown device 'warp:1'"),
        (["--data", "nowhere.txt"], "No such file.*nowhere.txt"),
        (["--seq-len", "9000"], "The text has .* tokens: needs at least 18000, two of --seq-len"),
        (["--model", "./nowhere"], "No model './nowhere': must be a directory with a config.json, or a name"),
    ],
)
def test_bad_arguments_are_named(model, text, tmp_path, capsys, flags, message) -> None:
    given = ["--model", str(model), "--data", str(text), "--scratch", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main([*given, *flags])
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*.jsonl"))


def test_the_model_s_own_tokenizer_is_used(trial, model) -> None:
    encoded = trial.encode("2 times 2")
    assert encoded.tolist() == list(b"2 times 2")
    words = Tokenizer(WordLevel({"2": 0, "times": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    assert trial.encode("2 times 3").tolist() == [0, 1, 2]


def test_a_small_vocabulary_without_a_tokenizer_is_refused(trial, model) -> None:
    LlamaConfig(vocab_size=100).save_pretrained(model)
    with pytest.raises(ValueError, match="has no tokenizer, and its 100 tokens are too few for the 256 bytes"):
        trial.windows()
