import pytest

from training.data.corpus import Document, deduplicated, split_by_file, standard_library, text_files
from training.data.tokenization import ByteTokenizer, encode_all


@pytest.fixture(scope="module")
def library():
    return standard_library()


def test_the_standard_library_is_a_real_corpus(library):
    names = [document.name for document in library]
    assert names == sorted(names)
    assert len(library) > 300
    assert sum(len(document.text) for document in library) > 5_000_000
    assert {"argparse.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith(("test/", "idlelib/"))]


def test_it_is_the_same_every_time(library):
    assert standard_library() == library


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "pkg/c.py", "test/t.py", "site-packages/s.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    assert [document.name for document in standard_library(tmp_path)] == ["a.py", "b.py", "pkg/c.py"]
    rglob = type(tmp_path).rglob
    monkeypatch.setattr(type(tmp_path), "rglob", lambda *arguments: sorted(rglob(*arguments), reverse=True))
    assert [document.name for document in standard_library(tmp_path)] == ["a.py", "b.py", "pkg/c.py"]


def test_split_is_by_file_and_covers_everything(library):
    train, held_out = split_by_file(library)
    assert sorted(train + held_out) == sorted(library)
    assert not {d.name for d in train} & {d.name for d in held_out}
    assert not {d.text for d in train} & {d.text for d in held_out}
    assert len(held_out) == round(0.05 * len(library))


def test_split_depends_on_names_not_on_order_or_text(library):
    names = {document.name for document in split_by_file(library)[1]}
    changed = [Document(document.name, "changed") for document in reversed(library)]
    assert {document.name for document in split_by_file(changed)[1]} == names


def test_two_files_can_be_split_and_one_cannot():
    a, b = Document("a", "text a"), Document("b", "text b")
    train, held_out = split_by_file([a, b])
    assert len(train) == len(held_out) == 1
    with pytest.raises(ValueError, match="Cannot hold out one of 1 file"):
        split_by_file([a])


def test_duplicates_and_blank_files_go():
    documents = [Document("a", "x"), Document("b", "x"), Document("c", " \n"), Document("d", "y")]
    assert [document.name for document in deduplicated(documents)] == ["a", "d"]


def test_text_files_by_glob(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "deep" / "two.txt").write_text("two")
    (tmp_path / "deep" / "three.md").write_text("three")
    found = text_files([f"{tmp_path}/**/*.txt", f"{tmp_path}/one.txt"])
    assert sorted(document.text for document in found) == ["one", "two"]
    with pytest.raises(ValueError, match=r"No text file matches .*\.rst"):
        text_files([f"{tmp_path}/*.rst"])


def test_bytes_are_lossless_and_documents_end():
    tokens = encode_all(ByteTokenizer(), ["naïve", "", "b"]).tolist()
    assert tokens == [*"naïve".encode(), 256, 256, ord("b"), 256]
    assert max(tokens) < ByteTokenizer.vocab_size
