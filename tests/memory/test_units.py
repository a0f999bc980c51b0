import pytest

from grass.memory import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GB", 40_000_000_000),
        ("40GiB", 42_949_672_960),
        (" 22.5 GiB", 24_159_191_040),
        ("500MB", 500_000_000),
        ("1.5MiB", 1_572_864),
        ("40gb", 40_000_000_000),
        ("40 gib", 42_949_672_960),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["40", "40G", "40g", "GB", "-4GB", "4e1GB", "1,5GB", "", "4GB4"])
def test_sizes_without_a_known_unit(text):
    with pytest.raises(ValueError, match=r"must be a number with one of the units GB, GiB, MB, MiB, as in 40GB"):
        parse_bytes(text)


def test_nothing_is_no_size():
    with pytest.raises(ValueError, match="must be > 0"):
        parse_bytes("0GB")


def test_words():
    assert format_bytes(38_386_000_000) == "38.39 GB"
