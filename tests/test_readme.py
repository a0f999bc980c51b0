"""The README's Python runs as written, and it stays short."""

import re
from pathlib import Path

import figures
import torch
from page_tables.keys import KEYS
from page_tables.source import select

README = Path(__file__).parents[1] / "README.md"


def test_ten_lines_run(capsys) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    loss = float(capsys.readouterr().out.splitlines()[-1])
    low, high = map(float, re.search(r"between ([\d.]+) and ([\d.]+)", blocks[0]).groups())
    assert low < loss < high


def test_is_short() -> None:
    assert len(README.read_text().splitlines()) < 150


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert link.startswith("http") or (README.parent / link).exists(), link


def test_a_loss_of_fewer_than_three_seeds_says_so() -> None:
    losses = 0
    for paragraph in re.split(r"\n\n|\n- ", README.read_text()):
        expressions = [match[3] for match in figures.FIGURE.finditer(paragraph)]
        expressions += [KEYS[match[3]][0] for match in figures.KEYED.finditer(paragraph)]
        for expression in expressions:
            for name, row in re.findall(r"([\w/]+\.csv): ([^]]*): (?:mean )?loss_100", expression):
                losses += 1
                seeds = len(select(name, row))
                assert seeds >= 3 or re.search(r"\b(one|two) seeds?\b", paragraph), f"{seeds} of {row}: {paragraph}"
    assert losses > 10
