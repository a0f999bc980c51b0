"""Every measured number of the pages is that of its CSV: ``scripts/figures.py``."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
figures = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
corrected, evaluate = figures["corrected"], figures["evaluate"]
source, support = sys.modules["page_tables.source"], sys.modules["page_tables.support"]

CONDITIONS = r"torch 2\.13\.0|Python 3\.1\d|galore-torch 1\.0|apollo-torch 1\.0\.3|fira 1\.0\.2|DeepSpeed 0\.19\.8|"
CONDITIONS += r"Apache-2\.0|0\.87 million|8\.8 million|1\.1 million|4\.4 million|about\s+0\.015"
"""Decimals that are no measurements: versions, sizes of models and data, and the noise as the authors judge it."""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A folder of CSVs in place of benchmarks/."""
    monkeypatch.setattr(source, "BENCHMARKS", tmp_path)
    source.read.cache_clear()
    (tmp_path / "a.csv").write_text("name,seed,ms\nslow,0,3.0\nfast,0,1.5\nfast,1,1.0\n")
    yield tmp_path
    source.read.cache_clear()


@pytest.mark.slow
def test_nothing_differs(capsys) -> None:
    assert figures["main"]([]) == 0, capsys.readouterr().out


def test_numbers_are_corrected(measured) -> None:
    text = "9.9<!-- a.csv: slow: ms: .1f --> ms, ?<!-- = [a.csv: slow: ms] / [a.csv: fast & seed=0: ms]: .2f --> times"
    assert corrected(text) == (text.replace("9.9", "3.0").replace("?", "2.00"), [])


def test_a_key_stands_for_an_expression(measured, monkeypatch) -> None:
    monkeypatch.setitem(figures["KEYS"], "twice", ("[a.csv: slow: ms] / [a.csv: fast & seed=0: ms]", ".1f"))
    assert corrected("it is 7<!-- =twice --> times") == ("it is 2.0<!-- =twice --> times", [])
    _, (problem,) = corrected("7<!-- =thrice -->")
    assert "thrice" in problem


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("a.csv: slow: ms", 3.0),
        ("a.csv: name=fast & 1: ms", 1.0),
        ("a.csv: fast: mean ms", 1.25),
        ("a.csv: fast: count ms", 2),
        ("[a.csv: slow: ms] > [a.csv: fast: mean ms]", True),
        ("abs([a.csv: fast & 1: ms] - 3) < 1", False),
    ],
)
def test_references(measured, reference, expected) -> None:
    assert evaluate(reference) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1<!-- b.csv: x: y: .1f -->", "no benchmarks/b.csv"),
        ("1<!-- a.csv: medium: ms: .1f -->", "No row of a.csv matches 'medium'"),
        ("1<!-- a.csv: fast: ms: .1f -->", "2 rows of a.csv match 'fast'"),
        ("1<!-- a.csv: slow: hours: .1f -->", "no column 'hours'"),
        ("<!-- table: chairs -->\n<!-- end -->", "no table 'chairs'"),
        ("<!-- check: [a.csv: slow: ms] < 3 -->", "no longer true"),
    ],
)
def test_what_cannot_be_corrected_is_told(measured, text, problem) -> None:
    after, problems = corrected(text)
    assert after == text
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_check_that_holds_says_nothing(measured) -> None:
    assert corrected("<!-- check: [a.csv: slow: ms] >= 3 -->") == ("<!-- check: [a.csv: slow: ms] >= 3 -->", [])


def test_differences_exit_with_one_and_write_mends_them(measured, tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "README.md"
    page.write_text("0<!-- a.csv: slow: ms: .0f --> ms\n")
    run = figures["main"]
    monkeypatch.setitem(run.__globals__, "pages", lambda: [page])
    monkeypatch.setitem(run.__globals__, "ROOT", tmp_path)
    assert run([]) == 1
    assert "+ 3<!-- a.csv" in capsys.readouterr().out
    assert run(["--write"]) == 0
    assert run([]) == 0
    assert page.read_text().startswith("3<!--")


def test_memory_table_shows_host_memory_where_the_csv_has_it(monkeypatch) -> None:
    module = sys.modules["page_tables.memory"]
    rows = [row | {"host_gb": "0"} for row in source.read("memory.csv")]
    monkeypatch.setattr(module, "read", lambda name: rows)
    monkeypatch.setattr(source, "read", lambda name: rows)
    header, _, *lines = module.memory().splitlines()
    place = header.split(" | ").index("host")
    assert [line.split(" | ")[place] for line in lines] == ["0", "0", "0"]


@pytest.mark.parametrize("page", figures["pages"](), ids=lambda path: path.stem)
def test_no_number_is_loose(page) -> None:
    """Decimals, and numbers with a unit of speed or a per cent, come from a CSV or from CONDITIONS."""
    text = re.sub(r"<!-- table: .*?<!-- end -->|```.*?```|\$[^$]*\$", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(
        r"[-+]?[\d.,]*\d%?<!-- [^>]*?-->|<!--.*?-->|`[^`]*`|\]\([^)]*\)|https?://\S+", "", text, flags=re.DOTALL
    )
    text = re.sub(CONDITIONS, "", text)
    loose = re.findall(
        r"[^\n]{0,30}(?<![\w.])\d+\.\d+(?!\.?\w)[^\n]{0,20}|[^\n]{0,30}\b\d+ (?:ms|tokens/s|times as)\b", text
    )
    assert not loose


def test_matrix_says_what_the_tests_of_pairs_do(monkeypatch):
    answers = [("a", "a", "equal", ""), ("a", "b", "ValueError", "not b"), ("b", "b", "trains", "")]
    every = [
        dict(zip(("mode", "feature", "beside", "answer", "message"), ("dense", *row), strict=True)) for row in answers
    ]
    monkeypatch.setattr(support, "rows", lambda: every)
    table = support.support()
    assert "| a | equal | error |" in table
    assert "| b | error | trains |" in table
    assert "| a and b | ValueError: not b |" in table


def test_the_law_has_no_cells_with_other_options():
    """Columns that take turns are no other seed of columns that are drawn."""
    is_of_the_law = sys.modules["page_tables.law"].is_of_the_law
    plain = {"lr": "0.012", "scale": "0.5", "rank": "0.0625", "explore": "0.0625", "compact": "True"}
    assert is_of_the_law(plain)
    assert not is_of_the_law({key: value for key, value in plain.items() if key != "compact"})  # dense mode
    assert not is_of_the_law(plain | {"selection": "balanced", "update_interval": "100"})
    adamw = {"lr": "0.012", "scale": "0.125", "rank": "1.0", "update_interval": "1000000", "selection": "top_r"}
    assert is_of_the_law(adamw | {"dim": "auto", "state_policy": "reset", "explore": "0"})
