"""Source distribution and wheel: complete, and usable where the tree and its Python path are not."""

import ast
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import grass

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "grass" / "kernels"  # in a wheel; in the tree it is triton_kernels/
SOURCES = {
    *(str(path.relative_to(ROOT)) for path in (ROOT / "grass").rglob("*.py") if KERNELS not in path.parents),
    *(str(path.relative_to(ROOT)) for path in (ROOT / "triton_kernels").glob("*.py")),
    *(str(path.relative_to(ROOT)) for path in (ROOT / "grass").rglob("*") if path.suffix in (".cpp", ".h")),
    "grass/py.typed",
}
USE = """
import torch, grass, grass.kernels, grass.cpu.kernel
weight = torch.nn.Parameter(torch.ones(8, 6))
optimizer = grass.GrassAdamW([weight], rank=2, fused=FUSED)
weight.grad = torch.ones(8, 6)
optimizer.step()
assert (weight != 1).any() and torch.isfinite(weight).all()
for module in (grass, grass.kernels, grass.cpu.kernel):
    print(module.__file__)
"""


def python(*arguments: object, path: Path, cwd: Path) -> str:
    """Run Python elsewhere, with ``path`` first on its own path; what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(path), "XDG_CACHE_HOME": str(cwd / "cache")}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built of a copy of the tree by a Python that cannot import torch: the version is read, not imported."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored)
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise ImportError('torch is not there when a package is built')")
    python("-m", "build", "--no-isolation", "--outdir", folder / "dist", "tree", path=folder / "broken", cwd=folder)
    return folder


@pytest.mark.slow
def test_source_distribution(built: Path) -> None:
    with tarfile.open(built / "dist" / f"grass_torch-{grass.__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert names >= SOURCES | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_wheel(built: Path) -> None:
    """Exactly the sources, and the metadata."""
    with zipfile.ZipFile(built / "dist" / f"grass_torch-{grass.__version__}-py3-none-any.whl") as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.startswith(f"grass_torch-{grass.__version__}.dist-info/")}
    assert names - metadata == {name.replace("triton_kernels/", "grass/kernels/") for name in SOURCES}
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_what_is_installed_trains_nothing_by_itself() -> None:
    """The loop, rival optimizers, tokenizers and reports are scripts: no installed module is one or imports one."""
    training = {path.stem for path in (ROOT / "scripts").iterdir()}
    assert {"training", "pretrain", "finetune"} <= training
    for name in SOURCES:
        if name.endswith(".py"):
            tree = ast.parse((ROOT / name).read_text())
            nodes = list(ast.walk(tree))
            imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
            assert not training & {module.split(".")[0] for module in imported}, name
    assert not {Path(name).parts[1] for name in SOURCES} & {"training", "pretrain", "finetune"}


@pytest.mark.slow
def test_metadata_is_valid(built: Path) -> None:
    python("-m", "twine", "check", "--strict", *(built / "dist").iterdir(), path=built, cwd=built)


@pytest.mark.slow
def test_wheel_works_outside_the_tree(built: Path) -> None:
    target = built / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--target", target]
    python("-m", "pip", "install", *options, *(built / "dist").glob("*.whl"), path=built, cwd=built)
    compiler = any(map(shutil.which, ("g++", "clang++")))
    code = USE.replace("FUSED", "True" if compiler else "None")
    files = python("-c", code, path=target, cwd=built).split()
    installed = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert installed == {"grass", "bin"} | ({"__pycache__"} & installed)  # no trainer, no scripts, no tests
    assert {path.name for path in (target / "bin").iterdir()} == {"grass-memory"}
    assert len(files) == 3
    assert all(Path(file).is_relative_to(target) for file in files)


def test_a_checkout_on_the_path_says_how_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import grass"]  # without site-packages, so without an installation
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "which is not installed" in done.stderr
    assert "Run `pip install -e .` in the checkout" in done.stderr


def test_the_newest_versions_are_asked_for_without_bounds() -> None:
    """`make test-next` would otherwise get the versions that `make test` has."""
    asked = runpy.run_path(str(ROOT / "scripts" / "newest.py"))["requirements"]()
    assert {"torch", "transformers", "pytest-xdist", "numpy"} <= set(asked)
    assert not [line for line in asked if line.startswith(("torch<", "torch>", "transformers<", "transformers>"))]
