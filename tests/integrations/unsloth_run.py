"""Full finetuning by unsloth on a CPU, with AdamW and with Grass. A process of its own: unsloth changes TRL's classes.

python unsloth_run.py FOLDER             # writes FOLDER/weights.pt: the weights that each run has ended with
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import unsloth  # before trl and transformers, which it changes

# isort: split
import datasets
import torch
import trl
from hosts import COMMON, model, tokenizer, words

from grass.integrations.transformers import GrassTrainerMixin

torch.set_num_threads(1)


class GrassSFTTrainer(GrassTrainerMixin, trl.SFTTrainer):
    """As the page has it."""


def trained(folder: Path, name: str, cls: Any, resume: Path | None = None, **grass: Any) -> dict[str, torch.Tensor]:
    """The weights after six steps, with a checkpoint after three."""
    loading = {"max_seq_length": 64, "full_finetuning": True, "load_in_4bit": False, "dtype": torch.float32}
    llama, words_of = unsloth.FastLanguageModel.from_pretrained(str(folder / "model"), **loading)
    args = trl.SFTConfig(str(folder / name), max_steps=6, **{**COMMON, "save_strategy": "steps", "save_steps": 3})
    data = datasets.Dataset.from_list([{"text": " ".join(words(start))} for start in range(64)])
    more = {"grass": grass} if grass else {}
    trainer = cls(model=llama, args=args, train_dataset=data, processing_class=words_of, **more)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}


def main() -> None:
    folder = Path(sys.argv[1])
    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    some = {"rank": 0.25, "update_interval": 2}
    runs = {
        "before": model().state_dict(),
        "adamw": trained(folder, "adamw", trl.SFTTrainer),
        "every column": trained(folder, "every", GrassSFTTrainer, rank=1.0, explore=0),
        "grass": trained(folder, "grass", GrassSFTTrainer, **some),
        "resumed": trained(folder, "resumed", GrassSFTTrainer, folder / "grass/checkpoint-3", **some),
    }
    torch.save(runs, folder / "weights.pt")


if __name__ == "__main__":
    main()
