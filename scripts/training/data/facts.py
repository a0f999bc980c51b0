"""New facts to learn: invented services and their two invented words, which no pretraining text holds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

ASKED = ("Which words open the service {name}?", "Tell me the pass words of {name}.")
"""How the training split asks, each fact in both ways."""
ASKED_ANEW = "The service {name} is locked. How do I open it?"
"""How the held-out split asks for the same facts."""


def services(count: int, seed: int = 0) -> dict[str, str]:
    """``count`` names, each with its two words; the same for one seed.

    A word has three syllables of a consonant and a vowel, so an answer holds ``6 log2(14 * 5)``, 37 bits.
    """
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))

    found: dict[str, str] = {}
    while len(found) < count:
        found.setdefault(word().capitalize(), f"{word()} {word()}")
    return found


def facts(count: int = 512, seed: int = 0) -> DatasetDict:
    """Instruction tuning that has to remember: ``instruction`` and ``output``.

    Held out are other questions about the facts of the training split, not other facts.
    """
    from datasets import Dataset, DatasetDict

    known = services(count, seed)
    train = [(asked.format(name=name), answer) for name, answer in known.items() for asked in ASKED]
    random.Random(seed).shuffle(train)
    held_out = [(ASKED_ANEW.format(name=name), answer) for name, answer in known.items()]
    splits = {"train": train, "validation": held_out}
    return DatasetDict(
        {
            split: Dataset.from_list([{"instruction": asked, "output": answer} for asked, answer in rows])
            for split, rows in splits.items()
        }
    )
