"""Text corpora made of files: the Python standard library that is already installed, or the user's own files."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
)
"""Parts of the standard library left out: third-party packages, tests, demonstrations and generated code tables."""


class Document(NamedTuple):
    """One file: its name, which decides the split, and its text."""

    name: str
    text: str


def standard_library(root: str | Path | None = None) -> list[Document]:
    """The ``*.py`` files of the standard library (or under ``root``), sorted by relative path, without duplicates."""
    base = Path(root or sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(base) for path in base.rglob("*.py"))
    kept = [n for n in names if not EXCLUDED_DIRECTORIES & set(n.parts) and not n.name.startswith("_sysconfigdata")]
    return deduplicated(_read(base / name, name.as_posix()) for name in kept)


def text_files(patterns: Iterable[str]) -> list[Document]:
    """The files that match the glob patterns (``**`` allowed), sorted by path, without duplicates.

    Raises:
        ValueError: a pattern matches no file.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        matches = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
        if not matches:
            raise ValueError(f"No text file matches {pattern!r}")
        paths.update(matches)
    return deduplicated(_read(path, path.as_posix()) for path in sorted(paths))


def deduplicated(documents: Iterable[Document]) -> list[Document]:
    """The documents whose text is neither blank nor that of an earlier one."""
    first_of: dict[bytes, Document] = {}
    for document in documents:
        if document.text.strip():
            first_of.setdefault(hashlib.sha256(document.text.encode("utf-8", "replace")).digest(), document)
    return list(first_of.values())


def split_by_file(documents: Sequence[Document], held_out: float = 0.05) -> tuple[list[Document], list[Document]]:
    """Training and evaluation documents: whole files, those with the smallest hashes of their names held out.

    Args:
        documents: two or more.
        held_out: fraction of the files to hold out, at least one of them.

    Raises:
        ValueError: there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(
            f"Cannot hold out one of {len(documents)} file(s) of different contents: at least 2 are needed, or "
            "--eval-files"
        )
    ranked = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    names = {document.name for document in ranked[: max(1, round(held_out * len(ranked)))]}
    return [d for d in documents if d.name not in names], [d for d in documents if d.name in names]


def _read(path: Path, name: str) -> Document:
    return Document(name, path.read_bytes().decode("utf-8", errors="replace"))
