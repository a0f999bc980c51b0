"""The pages' Python runs as written, the reference is complete, the diagrams are drawn by their script."""

import contextlib
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import grass

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["index", "from-adamw", "from-galore", "choosing", "memory", "offload", "streaming", "models", "finetuning"]
SCRIPTS = {"distributed": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "tuning": []}
"""Pages whose code is one script, and what comes between Python and it."""


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


def test_every_page_with_code_is_run():
    with_code = {path.stem for path in DOCS.glob("*.md") if "```python" in path.read_text()}
    assert with_code == {*PAGES, *SCRIPTS}


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS)
def test_code_runs_in_several_processes(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "page.py"
    last = "dist.destroy_process_group()" if "dist." in blocks[0] else ""
    script.write_text("\n".join([*blocks, last]))
    command = [sys.executable, *SCRIPTS[page], str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "error" not in done.stdout


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda path: path.stem)
def test_names_exist(page):
    for name in set(re.findall(r"`(grass\.[\w.]+)\b", page.read_text())):
        parts = name.split(".")
        found = grass
        for depth, part in enumerate(parts[1:], start=2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:depth]))
            found = getattr(found, part)


def test_every_page_begins_with_a_summary():
    for path in {*DOCS.rglob("*.md")} - {DOCS / "reference" / "changelog.md"}:
        title, summary = path.read_text().split("\n\n")[:2]
        assert title.startswith("# ")
        assert not summary.startswith(("#", "|", "```", "-", "<!--", "!")), path.name


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
    for script, flags in commands:
        names = runpy.run_path(str(ROOT / script))
        known = names["argument_parser"]()._option_string_actions if "argument_parser" in names else None
        for flag in re.findall(r"--[\w-]+", flags):
            assert flag in known if known else f'"{flag}"' in (ROOT / script).read_text(), flag


@pytest.mark.slow
def test_diagrams_are_those_of_the_script(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "diagrams.py", "--out", tmp_path], check=True)
    folders = tmp_path, DOCS / "images"
    drawn, committed = ({path.name: drawing(path.read_text()) for path in folder.glob("*.svg")} for folder in folders)
    shown = set(re.findall(r"images/(\w+\.svg)", "".join(page.read_text() for page in DOCS.glob("*.md"))))
    assert drawn.keys() == committed.keys() == shown
    for name, (shape, numbers) in drawn.items():
        assert shape == committed[name][0], name
        assert numbers == pytest.approx(committed[name][1], abs=0.01), name  # hundredths of a point


def drawing(svg):
    """What an SVG file draws: its text without numbers, and the numbers. The metadata names matplotlib's version."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    number = r"-?\d+(?:\.\d+)?"
    return re.sub(number, "0", svg), [float(n) for n in re.findall(number, svg)]
