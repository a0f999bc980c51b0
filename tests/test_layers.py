"""Layers of the package know nothing of those above them: neither imports (``lint-imports``) nor names."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACT = configparser.ConfigParser()
CONTRACT.read(ROOT / "setup.cfg")
LAYERS = [
    re.findall(r"grass\.(\w+)", line)
    for line in CONTRACT["importlinter:contract:layers"]["layers"].split("\n")
    if line.strip()
]
"""The modules of each layer, from top to bottom."""

FEATURES = re.compile(
    r"offload|streaming|streamed|\bgrid\b|parallel_2d|arriving|\bgated\b|deferred|\.(written|gathered)\b"
)
"""What offload, streaming and a grid of ranks are called, and fields that converted layers once had for them."""


def sources(module: str) -> list[Path]:
    """The files of a module or a folder of ``grass``."""
    path = ROOT / "grass" / module
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def found(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    """Lines that match, with their places."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("folder", ["compact_mode", "stepping", "state", "selection", "cpu"])
def test_what_steps_names_no_feature_above_it(folder: str) -> None:
    assert not found(FEATURES, sources(folder))


def test_features_name_themselves() -> None:
    """The pattern finds what it is to find."""
    for module, name in (("offload", "offload"), ("streaming", "streamed"), ("distributed", "parallel_2d")):
        assert any(name in line for line in found(FEATURES, sources(module)))


@pytest.mark.parametrize("number", range(1, len(LAYERS) - 1))
def test_no_module_names_one_above_it(number: int) -> None:
    """Docstrings refer down or aside, too; those of the lowest layer, kernels on the CPU, have the formulas above."""
    above = [module for layer in LAYERS[:number] for module in layer]
    pattern = re.compile(rf"(:\w+:`~?|#.*)grass\.({'|'.join(above)})\b")
    assert not found(pattern, [file for module in LAYERS[number] for file in sources(module)])


@pytest.mark.parametrize("folder", ["compact_mode", "offload", "streaming"])
def test_a_folder_says_what_each_of_its_classes_belongs_to(folder: str) -> None:
    files = sources(folder)
    classes = {name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)}
    table = next(file for file in files if file.name == "__init__.py").read_text()
    named = set(re.findall(r"``(_?[A-Z]\w+)``", table))
    assert named == classes
