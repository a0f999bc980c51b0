"""Loss, and bytes of optimizer state and gradients, by AdamW and by Grass in other people's trainers, on a CPU.

    python scripts/bench/hosts.py --out benchmarks/hosts.csv

Every host trains a tiny LLaMA on sequences of words that count in strides, by its own loop. ``loss`` is the last loss
that torchtitan logs, and elsewhere that of 16 sequences of its data after training. Hosts that are not installed are
left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.memory import state_bytes
from grass.memory.llama import llama_config

WORDS, LENGTH, RANK = 61, 24, 0.25
RATE = 2e-3
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
Found = dict[str, Any]


def model() -> Any:
    """A LLaMA of 0.9 million parameters."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config("1m", vocab_size=WORDS + 3, max_seq_len=64))


def words(start: int) -> list[str]:
    """A sequence that counts in a stride of its own."""
    return [f"w{(start * 7 + i * (1 + start % 4)) % WORDS}" for i in range(LENGTH)]


def tokenizer() -> Any:
    """One token a word."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    every = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(every)}, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def sequences(first: int, count: int) -> list[dict[str, Any]]:
    """Token ids with labels."""
    ids = [tokenizer().convert_tokens_to_ids(words(start)) for start in range(first, first + count)]
    return [{"input_ids": row, "labels": row} for row in ids]


@torch.no_grad()
def loss_of(trained: Any, rows: list[Any]) -> float:
    """The loss of sequences after training."""
    ids, labels = (torch.tensor([list(row[name]) for row in rows]) for name in ("input_ids", "labels"))
    return float(trained.float().eval()(input_ids=ids, labels=labels).loss)


def found(trained: Any, optimizer: Any, rows: list[Any] | None = None) -> Found:
    """What the table says of a trained model."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    gradients = sum(p.nbytes for p in trained.parameters() if p.requires_grad)
    loss = loss_of(trained, rows or sequences(0, 16))
    return {"loss": loss, "state_bytes": state_bytes(optimizer).device, "gradient_bytes": gradients}


def by_transformers(steps: int, folder: Path, *, grass: bool) -> Found:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from grass.integrations.transformers import GrassTrainer

    args = TrainingArguments(str(folder), max_steps=steps, **COMMON)
    cls, more = (GrassTrainer, {"grass": {"rank": RANK}}) if grass else (Trainer, {})
    trainer = cls(model(), args, train_dataset=sequences(0, 64), **more)
    trainer.train()
    return found(trainer.model, trainer.optimizer)


def by_trl(steps: int, folder: Path, *, grass: bool) -> Found:
    """TRL's ``SFTTrainer``."""
    import datasets
    import trl

    from grass.integrations.transformers import GrassTrainerMixin

    class GrassSFTTrainer(GrassTrainerMixin, trl.SFTTrainer):
        """As the mixin's docstring has it."""

    args = trl.SFTConfig(str(folder), max_steps=steps, **COMMON)
    cls, more = (GrassSFTTrainer, {"grass": {"rank": RANK}}) if grass else (trl.SFTTrainer, {})
    data = datasets.Dataset.from_list([{"text": " ".join(words(start))} for start in range(64)])
    trainer = cls(model(), args=args, train_dataset=data, processing_class=tokenizer(), **more)
    trainer.train()
    return found(trainer.model, trainer.optimizer)


def by_llamafactory(steps: int, folder: Path, *, grass: bool) -> Found:
    """LLaMA-Factory's ``SFTTrainer`` of v1, built as its ``run_sft`` builds it."""
    from llamafactory.v1.accelerator.interface import DistributedInterface
    from llamafactory.v1.config import get_args
    from llamafactory.v1.core.data_engine import DataEngine
    from llamafactory.v1.core.model_engine import ModelEngine
    from llamafactory.v1.trainers.sft_trainer import SFTTrainer

    import_module("grass.integrations.llamafactory")

    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    talks = []
    for start in range(64):
        parts = [("user", words(start)[:4], 0.0), ("assistant", words(start)[4:], 1.0)]
        talks.append(
            {
                "messages": [
                    {"role": who, "content": [{"type": "text", "value": " ".join(what)}], "loss_weight": weight}
                    for who, what, weight in parts
                ]
            }
        )
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "train_dataset": str(folder / "talks.jsonl"),
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "micro_batch_size": 4,
        "cutoff_len": 64,
        "bf16": False,
        "batching_workers": 0,
        "enable_activation_checkpointing": False,
        "learning_rate": RATE,
    }
    if grass:
        settings["peft_config"] = {"name": "grass_compact", "rank": RANK}
        settings["optim_config"] = {"name": "grass", "lr": RATE}
    model_args, data_args, training_args, _ = get_args(settings)
    DistributedInterface(training_args.dist_config)
    engine = ModelEngine(model_args, is_train=True)
    data = DataEngine(data_args.train_dataset)
    trainer = SFTTrainer(args=training_args, model=engine.model, renderer=engine.renderer, train_dataset=data)
    trainer.fit()
    return found(trainer.model, trainer.optimizer, engine.renderer.process_samples(talks[:16]))


def by_fabric(steps: int, folder: Path, *, grass: bool) -> Found:
    """A loop under Lightning's Fabric."""
    from lightning.fabric import Fabric

    from grass import GrassAdamW, compact

    fabric, llama = Fabric(accelerator="cpu", devices=1), model()
    if grass:
        compact(llama, rank=RANK)
    optimizer: Any = GrassAdamW(llama, lr=RATE) if grass else torch.optim.AdamW(llama.parameters(), lr=RATE)
    trained, stepped = fabric.setup(llama, optimizer)
    ids = torch.tensor([row["input_ids"] for row in sequences(0, 64)])
    for step in range(steps):
        part = ids[torch.arange(4 * step, 4 * step + 4) % len(ids)]
        stepped.zero_grad()
        fabric.backward(trained(input_ids=part, labels=part).loss)
        stepped.step()
    return found(llama, optimizer, sequences(0, 16))


def by_unsloth(steps: int, folder: Path, *, grass: bool) -> Found:
    """TRL's ``SFTTrainer`` as unsloth changes it, for full finetuning."""
    unsloth = import_module("unsloth")  # before trl, which it changes
    import datasets
    import trl

    from grass.integrations.transformers import GrassTrainerMixin

    class GrassSFTTrainer(GrassTrainerMixin, trl.SFTTrainer):
        """As the mixin's docstring has it."""

    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    loading = {"max_seq_length": 64, "full_finetuning": True, "load_in_4bit": False, "dtype": torch.float32}
    llama, words_of = unsloth.FastLanguageModel.from_pretrained(str(folder / "model"), **loading)
    args = trl.SFTConfig(str(folder / "out"), max_steps=steps, **COMMON)
    cls, more = (GrassSFTTrainer, {"grass": {"rank": RANK}}) if grass else (trl.SFTTrainer, {})
    data = datasets.Dataset.from_list([{"text": " ".join(words(start))} for start in range(64)])
    trainer = cls(model=llama, args=args, train_dataset=data, processing_class=words_of, **more)
    trainer.train()
    return found(trainer.model, trainer.optimizer)


def by_torchtitan(steps: int, folder: Path, *, grass: bool) -> Found:
    """torchtitan's Trainer, in one process; its model has two layers of width 256."""
    from titan.run import trained, write_data

    if not (folder / "text").exists():
        write_data(folder)
    overrides = [f'grass.integrations.torchtitan.linear={{"rank": {RANK}}}', "grass.integrations.torchtitan.optimizer"]
    chosen = ["--override.imports", *overrides] if grass else []
    (run,) = trained(0, folder, [["--training.steps", str(steps), *chosen]])
    return {"loss": run["losses"][-1], **{key: run[key] for key in ("state_bytes", "gradient_bytes")}}


HOSTS: dict[str, Callable[..., Found]] = {
    "transformers": by_transformers,
    "trl": by_trl,
    "llamafactory": by_llamafactory,
    "torchtitan": by_torchtitan,
    "lightning": by_fabric,
    "unsloth": by_unsloth,
}
"""How to train in each host, by package; unsloth is the last, because it changes TRL for the whole process."""


def rows(hosts: list[str], steps: int) -> Iterator[Found]:
    """AdamW and Grass in each host that is installed."""
    for host in hosts:
        if find_spec(host) is None:
            print(f"{host} is not installed: left out")
            continue
        sizes = {}
        for method in ("adamw", "grass"):
            with tempfile.TemporaryDirectory() as folder:
                got = HOSTS[host](steps, Path(folder), grass=method == "grass")
            sizes[method] = got["state_bytes"] + got["gradient_bytes"]
            megabytes = {f"{name}_mb": got[f"{name}_bytes"] / 1e6 for name in ("state", "gradient")}
            yield {
                "host": host,
                "version": version(host),
                "optimizer": method,
                "loss": got["loss"],
                **megabytes,
                "of_adamw": sizes[method] / sizes["adamw"],
            }


def main() -> None:
    """Train and write the table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/hosts.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    table = pd.DataFrame(rows(args.hosts, args.steps))
    print(table.to_string(index=False))
    write(table, args.out, steps=args.steps, rank=RANK)


if __name__ == "__main__":
    main()
