"""What the commands share."""

from pathlib import Path

import pytest

from grass.command_line import ArgumentParser, number, share

ROOT = Path(__file__).parents[1]


def test_errors_take_one_line_and_help_shows_defaults(capsys) -> None:
    parser = ArgumentParser("First line.\n\n    as written", prog="command")
    parser.add_argument("--steps", type=int, default=3, help="how many")
    parser.add_argument("--warmup", type=int, help="a tenth of the steps")
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--steps", "x"])
    assert exit_.value.code == 2
    expected = "command: error: argument --steps: invalid int value: 'x' (--help shows all flags)\n"
    assert capsys.readouterr().err == expected
    shown = parser.format_help()
    assert "\n    as written" in shown
    assert "how many (default: 3)" in shown
    assert "None" not in shown


@pytest.mark.parametrize(
    ("text", "value"), [("16", 16), ("0.25", 0.25), ("1e-1", 0.1), ("1.0", 1.0), ("1/8", 0.125), ("1/1", 1.0)]
)
def test_numbers(text: str, value: float) -> None:
    assert (number(text), type(number(text))) == (value, type(value))
    assert (share(text), type(share(text))) == (value, float)


@pytest.mark.parametrize("text", ["1/0", "1/", "/2", "0.5/2", "half", ""])
def test_no_numbers(text: str) -> None:
    for kind in (number, share):
        with pytest.raises(ValueError, match=r"."):
            kind(text)


def test_every_script_has_this_parser() -> None:
    scripts = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("grass/*/__main__.py")]
    assert [str(path) for path in scripts if "argparse.ArgumentParser(" in path.read_text()] == []
