"""CONTRIBUTING.md is true: what it names exists, its snippet runs, and the files that it asks for are there."""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.test_docs import forgotten_rules

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
QUOTED = re.findall(r"`([^`\n]+)`", PROSE)
KERNELS = [
    p.stem for p in (ROOT / "triton_kernels").glob("*.py") if re.search(r"^\w+ = kernel_op\(", p.read_text(), re.M)
]
INTEGRATIONS = [p.stem for p in (ROOT / "grass/integrations").iterdir() if not p.name.startswith("__")]


def section(title):
    return PROSE.split(f"## {title}\n")[1].split("\n## ")[0]


def sources():
    return "".join(path.read_text() for folder in ("grass", "triton_kernels") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", [q for q in QUOTED if "/" in q and not re.search("NOUN|NAME|--", q)])
def test_paths_exist(path):
    assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


def test_map_has_every_folder_and_module():
    folders = {path.parent for path in (ROOT / "grass").rglob("__init__.py")} - {ROOT / "grass"}
    named = {ROOT / path for path in QUOTED if path.startswith("grass/")}
    assert not [f for f in folders if "kernels" not in f.parts and not {f, f.parent} & named]
    assert {path for path in (ROOT / "grass").glob("*.py") if path.name != "__init__.py"} <= named


def test_map_is_in_the_order_of_the_contract():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].strip().splitlines()
    height = {name.strip(): len(layers) - i for i, line in enumerate(layers) for name in line.split("|")}
    rows = re.findall(r"^\| `(grass/[\w/.]+)`", section("Map"), flags=re.MULTILINE)
    modules = [row.removesuffix(".py").strip("/").replace("/", ".") for row in rows]
    heights = [height[".".join(module.split(".")[:2])] for module in modules]
    assert heights == sorted(heights)


@pytest.mark.parametrize("title", ["The path of a gradient", "Add a selection rule", "Add a kernel", "Add a backend"])
def test_functions_exist(title):
    names = [
        q for q in re.findall(r"`([\w.]+)`", section(title)) if "/" not in q and not q.startswith(("grass", ".", "nn."))
    ]
    code = sources()
    for name in names:
        last = name.rpartition(".")[2]
        assert re.search(
            rf"\b(def|class) {last}\b|^ +{last}: |self\.{last} = |register_parameter\(\"{last}\"", code, re.M
        ), name
    assert names


def test_folders_of_the_path_hold_what_is_named_with_them():
    for name, folder in (
        ("CompactLinear", "compact_mode"),
        ("sketch_product", "compact_mode"),
        ("OptimizerStep", "stepping"),
        ("step_active", "stepping"),
        ("step_rows", "stepping"),
        ("refresh", "state"),
        ("arm", "compact_mode"),
        ("select_rows", "selection"),
        ("draw_explored", "selection"),
        ("Batch", "cpu"),
    ):
        found = [
            p
            for p in (ROOT / "grass" / folder).rglob("*.py")
            if re.search(rf"^(def|class) {name}\b", p.read_text(), re.M)
        ]
        assert found, (name, folder)


def test_path_has_ten_lines():
    assert re.findall(r"^(\d+)\. ", section("The path of a gradient"), re.M) == [str(i) for i in range(1, 11)]


@pytest.mark.parametrize("title", ["Add a selection rule", "Add a kernel", "Add a backend", "Add an integration"])
def test_recipes_are_short(title):
    assert len([line for line in section(title).splitlines() if line]) < 10


def test_selection_rule_runs():
    with forgotten_rules():
        for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
            exec(compile(block, "CONTRIBUTING.md", "exec"), {})


@pytest.mark.parametrize("noun", KERNELS)
def test_every_kernel_followed_the_recipe(noun):
    recipe = section("Add a kernel")
    patterns = [q for q in re.findall(r"`([^`\n]+)`", recipe) if "NOUN" in q]
    assert len(patterns) == 3
    for pattern in patterns:
        assert (ROOT / pattern.replace("NOUN", noun)).exists(), pattern
    kernel = (ROOT / f"triton_kernels/{noun}.py").read_text()
    assert all(part in kernel for part in ("kernel_op(", "twin=", "launch=", "fake="))
    for page in (
        "triton_kernels/__init__.py",
        "tests/kernels/compile_all.py",
        "scripts/gpu_suite.sh",
        "docs/benchmarks.md",
    ):
        assert page in recipe
        assert noun in (ROOT / page).read_text(), page


def test_kernels_import_nothing_of_grass():
    for path in (ROOT / "triton_kernels").glob("*.py"):
        assert not re.search(r"^\s*(from|import) grass\b", path.read_text(), re.M), path.name


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_every_integration_followed_the_recipe(name):
    recipe = section("Add an integration")
    assert f"grass.integrations.{name}" in (ROOT / "docs/reference/integrations.md").read_text()
    extra = re.search(rf"^    {name}\b", (ROOT / "setup.cfg").read_text(), re.M)
    assert extra or f"{name}==" in (ROOT / "docs/integrations.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests/integrations").glob("*.py"))
    assert f"grass.integrations.{name}" in tests
    assert "tests/integrations/" in recipe


def test_import_grass_imports_no_integration():
    code = "import sys, grass; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "grass.integrations" not in out
    assert "transformers" not in out.split()
