"""Under torchrun, for each mode: a whole run, and one resumed from its checkpoint. ``ddp_run.py MODELS OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.integrations.runs import MODES, arguments, trainer


def main(models: Path, out: Path) -> None:
    for mode in MODES:
        for name in ("whole", "resumed"):
            model = AutoModelForCausalLM.from_pretrained(models / name, attn_implementation="eager")
            args = arguments(out / f"{mode}-{name}", train_sampling_strategy="sequential")
            run = trainer(model, args, mode)
            assert args.world_size == 2
            run.train(resume_from_checkpoint=str(out / f"{mode}-whole/checkpoint-3") if name == "resumed" else None)
            assert type(run.model_wrapped) is torch.nn.parallel.DistributedDataParallel
            torch.save(dict(model.state_dict()), out / f"{mode}-{name}-{args.process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
