"""Train with every pair of features and write ``outcomes.csv``: ``python -m tests.pairs``."""

from __future__ import annotations

import csv

from tqdm import tqdm

from tests.pairs.outcomes import FILE, outcome, pairs


def main() -> None:
    """Write the file; each row says the message of an error too."""
    rows = []
    for pair in tqdm(pairs()):
        found = outcome(pair)
        rows.append([*pair, found.answer, found.message.split("\n")[0]])
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["mode", "feature", "beside", "answer", "message"], *rows])


if __name__ == "__main__":
    main()
