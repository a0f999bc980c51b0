"""Hours of a sweep, by hand, and the command that prints them."""

from __future__ import annotations

import re

import pytest

from grass.memory.__main__ import main
from grass.memory.duration import flops_per_token
from grass.memory.models import load_architecture
from grass.memory.setting import Setting
from grass.memory.sweep import Sweep


@pytest.mark.parametrize(
    ("trials", "devices", "microbatches", "expected"),
    [
        (8, 2, 1, (4, 8, 8)),  # a pipeline without micro-batches keeps one device busy at a time
        (8, 2, 2, (4, 8, 6)),
        (8, 8, 1, (1, 8, 8)),  # Hydra's eight devices
        (8, 8, 4, (1, 8, 8 * 11 / 32)),
        (5, 2, 1, (3, 5, 5)),
        (1, 1, 1, (1, 1, 1)),
    ],
)
def test_hours_by_hand(trials: int, devices: int, microbatches: int, expected: tuple[float, ...]) -> None:
    assert Sweep(trials, 300, devices).hours(3600 / 300, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["6", "6x", "0x300", "6x0", "6*300", "-6x300", "6x300x2", ""])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Invalid --sweep .*must be TRIALSxSTEPS, such as 6x300"):
        Sweep.parse(text, 2)


def test_the_command_prints_hours(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "60m", "--batch", "2", "--sweep", "6x300", "--devices", "3", "--tflops", "0.5"])
    output = capsys.readouterr().out
    setting = Setting(batch_size=2).lowered(model := load_architecture("60m"), {"batch_size"})[0]
    header = next(line for line in output.splitlines() if "LoRA" in line and "Grass" in line)
    methods = re.split(r"\s{2,}", header.strip())
    step = {m: flops_per_token(m, model, setting) * setting.tokens / 0.5e12 for m in methods}
    for label, which in (("hours, pool of 3 devices", 0), ("hours, one device", 1), ("hours, pipelined over 3", 2)):
        found = [line for line in output.splitlines() if line.startswith(label)]
        numbers = [float(word.replace(",", "")) for word in re.split(r"\s{2,}", found[0].strip())[1:]]
        expected = [Sweep(6, 300, 3).hours(step[m], 2)[which] for m in methods]
        assert numbers == pytest.approx(expected, rel=5e-3), label  # three digits are printed


def test_it_says_how_many_trials_the_host_holds(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "13b", "--stream", "--sweep", "6x300", "--tflops", "200", "--host", "192GB"])
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if line.startswith("trials at a time in 192.00 GB")]
    totals = next(line for line in output.splitlines() if line.startswith("total on host"))
    for fits, total in zip(line.split()[-8:], totals.split()[-8:], strict=True):
        if fits != "-":
            assert int(fits) == pytest.approx(192 / float(total.replace(",", "")), abs=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sweep", "6x300"], "--sweep needs how long steps take: add --tflops, or --stream with --machine"),
        (["--sweep", "six", "--tflops", "1"], "Invalid --sweep six: must be TRIALSxSTEPS"),
        (["--sweep", "6x300", "--tflops", "1", "--devices", "0"], "Invalid --devices 0: must be >= 1"),
        (["--tflops", "1"], "--tokens and --tflops go together"),
        (["--sweep", "6x300", "--tflops", "-1"], "--tokens and --tflops go together|Invalid --tflops"),
    ],
)
def test_bad_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "60m", *flags])
    assert re.search(message, capsys.readouterr().err)
