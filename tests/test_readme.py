"""The README's Python runs as written, and it stays short."""

import re
from pathlib import Path

import torch

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
