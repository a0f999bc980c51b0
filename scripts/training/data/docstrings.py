"""A small real data set that needs no download: the docstrings of the installed Python standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from training.data.corpus import Document, standard_library

if TYPE_CHECKING:
    from datasets import DatasetDict

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "xml")
"""Packages with two hundred docstrings or more each, in every Python since 3.10."""
HELD_OUT = 0.15


class Docstring(NamedTuple):
    """A docstring, where it stands, and the ``class`` or ``def`` line it documents."""

    package: str
    signature: str
    text: str


@lru_cache(maxsize=2)
def docstrings(packages: tuple[str, ...] = PACKAGES) -> tuple[Docstring, ...]:
    """Those of all classes and functions of some packages of the standard library, each text once.

    Raises:
        ValueError: a package has none.
    """
    by_text: dict[str, Docstring] = {}
    for package in packages:
        documents = standard_library(Path(sysconfig.get_path("stdlib")) / package)
        found = [item for document in documents for item in _in_document(package, document)]
        if not found:
            raise ValueError(f"No docstrings in {package!r}: is it a package of this Python's standard library?")
        for item in found:
            by_text.setdefault(item.text, item)
    return tuple(by_text.values())


def packages_of_docstrings() -> DatasetDict:
    """Classification: which package is this docstring from? ``text`` and ``label``, split at random."""
    from datasets import ClassLabel, Dataset

    rows = [{"text": item.text, "label": item.package} for item in docstrings()]
    dataset = Dataset.from_list(rows).cast_column("label", ClassLabel(names=list(PACKAGES)))
    return _split(dataset.train_test_split(HELD_OUT, seed=0))


def docstrings_of_signatures() -> DatasetDict:
    """Instruction tuning: what does this function do? ``instruction``, ``input`` and ``output``."""
    from datasets import Dataset

    rows = [
        {
            "instruction": f"Write a one-paragraph docstring for this function of the package {item.package}.",
            "input": item.signature,
            "output": item.text.split("\n\n")[0],
        }
        for item in docstrings()
        if not item.signature.startswith("class ")
    ]
    return _split(Dataset.from_list(rows).train_test_split(HELD_OUT, seed=0))


def _split(dataset: DatasetDict) -> DatasetDict:
    dataset["validation"] = dataset.pop("test")
    return dataset


def _in_document(package: str, document: Document) -> Iterator[Docstring]:
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield Docstring(package, _signature(node), text)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}:"
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)}):"
