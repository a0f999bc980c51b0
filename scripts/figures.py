"""Keep every measured number of the pages equal to the CSV that it comes from.

    python scripts/figures.py           # what differs; exits with 1 if anything does
    python scripts/figures.py --write   # corrects the pages

README.md, docs/ and benchmarks/ hold three kinds of comments, invisible when rendered:

- A table between ``<!-- table: NAME -->`` and ``<!-- end -->`` is made by ``scripts/page_tables``.
- A number before ``<!-- FILE: ROW: COLUMN: FORMAT -->`` is a cell of a CSV in benchmarks/, FORMAT as in ``format()``.
  ``<!-- = EXPRESSION: FORMAT -->`` calculates with such cells in brackets, and ``<!-- =KEY -->`` is one that
  ``scripts/page_tables/keys.py`` names.
- ``<!-- check: EXPRESSION -->`` says on what a sentence rests, as in ``[a.csv: x: ms] < [a.csv: y: ms]``. Where it is
  false, the script says so, and somebody has to rewrite the sentence.

References are explained in ``scripts/page_tables/source.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from page_tables import make
from page_tables.keys import KEYS
from page_tables.source import evaluate

from grass.command_line import ArgumentParser

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(?<=<!-- table: )([^>\n]+?)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"([-+]?[\d.,]*\d%?|\?)(<!-- (?:= )?([^>]*?\.csv: .*?): ([-+,.\d]*[f%d]) -->)")
KEYED = re.compile(r"([-+]?[\d.,]*\d%?|\?)(<!-- =([\w-]+) -->)")
CHECK = re.compile(r"<!-- check: (.*?) -->")


def pages() -> list[Path]:
    """Every page that may hold measured numbers."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    return [
        *(ROOT / name for name in names),
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("benchmarks/**/*.md")),
    ]


def corrected(text: str) -> tuple[str, list[str]]:
    """A page with the tables and numbers of the CSVs, and what cannot be corrected: failed checks, bad references."""
    problems = []

    def guarded(correct, match: re.Match[str]) -> str:
        try:
            return correct(match)
        except (ValueError, KeyError, SyntaxError, NameError) as error:
            problems.append(f"{match[0][:60]!r}: {error}")
            return match[0]

    def check(match: re.Match[str]) -> str:
        if not evaluate(match[1]):
            raise ValueError("no longer true")
        return match[0]

    text = TABLE.sub(lambda m: guarded(_table, m), text)
    text = FIGURE.sub(lambda m: guarded(_figure, m), text)
    text = KEYED.sub(lambda m: guarded(_keyed, m), text)
    CHECK.sub(lambda m: guarded(check, m), text)
    return text, problems


def _table(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}\n{make(match[1])}\n\n"


def _figure(match: re.Match[str]) -> str:
    return format(evaluate(match[3]), match[4]) + match[2]


def _keyed(match: re.Match[str]) -> str:
    expression, how = KEYS[match[3]]
    return format(evaluate(expression), how) + match[2]


def differences(before: str, after: str) -> list[str]:
    """The lines that a correction changes."""
    old, new = before.splitlines(), after.splitlines()
    return [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--write", action="store_true", help="correct the pages")
    write, failed = parser.parse_args(argv).write, False
    for page in pages():
        before = page.read_text()
        after, problems = corrected(before)
        name = page.relative_to(ROOT)
        for problem in problems:
            print(f"{name}: {problem}")
        if before != after and write:
            page.write_text(after)
        elif before != after:
            print(f"{name}:", *differences(before, after), sep="\n")
        failed |= bool(problems) or (before != after and not write)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
