"""The data set made of Python itself."""

import inspect
import logging

import pytest

from training.data.docstrings import PACKAGES, docstrings, docstrings_of_signatures, packages_of_docstrings


def test_docstrings_are_those_python_shows():
    found = {item.signature: item for item in docstrings(("logging",))}
    function = found["def getLogger(name=None):"]
    assert function.text == inspect.getdoc(logging.getLogger)
    assert function.package == "logging"
    assert found["class Formatter:"].text == inspect.getdoc(logging.Formatter)


def test_every_text_once_and_every_package_many():
    items = docstrings()
    assert len({item.text for item in items}) == len(items) > 1000
    assert all(sum(item.package == package for item in items) > 100 for package in PACKAGES)


def test_splits_are_disjoint_and_repeat():
    dataset = packages_of_docstrings()
    train, held_out = set(dataset["train"]["text"]), set(dataset["validation"]["text"])
    assert not train & held_out
    assert len(held_out) == pytest.approx(0.15 * (len(train) + len(held_out)), abs=1)
    assert packages_of_docstrings()["validation"][:5] == dataset["validation"][:5]
    assert dataset["train"].features["label"].names == list(PACKAGES)


def test_instructions_are_functions_and_their_first_paragraph():
    rows = docstrings_of_signatures()["train"]
    assert all(row["input"].startswith(("def ", "async def ")) for row in rows)
    assert all(row["output"] and "\n\n" not in row["output"] for row in rows)


def test_unknown_package():
    with pytest.raises(ValueError, match="No docstrings in 'nonesuch'"):
        docstrings(("nonesuch",))
