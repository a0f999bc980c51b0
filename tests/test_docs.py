"""The pages' Python runs as written, the reference is complete, the diagrams are drawn by their script."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grass
from grass.training.run.flags import add_optimizer_flags

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["index", "from-adamw", "from-galore", "choosing", "memory", "finetuning"]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{page}.md"
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert blocks
    names = {}
    with forgotten_rules():
        for block in blocks:
            exec(compile(block, str(path), "exec"), names)


@contextlib.contextmanager
def forgotten_rules():
    """Rules that a page registers are gone afterwards."""
    from grass.selection.rules import _RULES

    before = dict(_RULES)
    yield
    _RULES.clear()
    _RULES.update(before)


def test_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"(?:auto(?:class|function|module)|data):: grass\.(\w+)$", text, flags=re.MULTILINE))
    assert set(grass.__all__) <= documented


def test_commands_name_scripts_and_flags_that_exist():
    commands = re.findall(r"python (scripts/\w+\.py)(.*?)(?:\n\n|```)", (DOCS / "finetuning.md").read_text(), re.DOTALL)
    assert {script for script, _ in commands} == {"scripts/finetune.py", "scripts/report.py"}
    optimizer_flags: list[str] = []
    add_optimizer_flags(lambda flag, **_: optimizer_flags.append(flag))
    for script, flags in commands:
        source = (ROOT / script).read_text()
        for flag in re.findall(r"--[\w-]+", flags):
            assert f'"{flag}"' in source or flag in optimizer_flags, flag


def test_diagrams_are_those_of_the_script(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "diagrams.py", "--out", tmp_path], check=True)
    drawn, committed = ({path.name for path in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "images"))
    shown = set(re.findall(r"images/(\w+\.svg)", (DOCS / "index.md").read_text()))
    assert drawn == committed == shown
