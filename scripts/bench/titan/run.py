"""torchtitan's Trainer on CPUs joined by gloo, which have not all that it asks of a device and of NCCL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grass.memory import state_bytes
from grass.parallel.shards import local

ABSENT: dict[str, Any] = {
    "get_device_name": lambda *device: "cpu",
    "get_device_properties": lambda *device: SimpleNamespace(total_memory=1),
    "reset_peak_memory_stats": lambda *device: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *device: {},
}
"""What torchtitan calls of a device's module and ``torch.cpu`` lacks."""


def sum_gradients(model: nn.Module) -> None:
    """As torchtitan has it, without NCCL's sum of scaled gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def on_cpus() -> None:
    """Let torchtitan take CPUs, in a process that has not imported it yet."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, function in ABSENT.items():
        setattr(torch.cpu, name, function)
    import torchtitan.distributed.fsdp
    import torchtitan.distributed.utils

    torchtitan.distributed.fsdp.disable_fsdp_gradient_division = sum_gradients
    torchtitan.distributed.utils.set_pg_timeouts = lambda **keywords: None  # a barrier of NCCL's


def write_data(folder: Path) -> None:
    """A tokenizer of 500 words, and texts that count in strides."""
    import tokenizers

    (folder / "tokenizer").mkdir()
    (folder / "text").mkdir()
    words = {word: index for index, word in enumerate(["<s>", "</s>", *(f"w{index}" for index in range(500))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    texts = [" ".join(f"w{(start * 7 + i * (1 + start % 4)) % 500}" for i in range(80)) for start in range(100)]
    (folder / "text" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def trained(rank: int, folder: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Run torchtitan's Trainer with each list of arguments; what became of model and optimizer."""
    os.environ |= {"GRASS_TITAN_DATA": str(folder), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    on_cpus()
    return [outcome(folder, arguments) for arguments in runs]


def outcome(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """What torchtitan's Trainer makes of the tiny model: losses, weights, state, and bytes of a rank."""
    from torchtitan.config import ConfigManager

    chosen = ["--module", "titan.model", "--config", "tiny", "--dump_folder", str(folder)]
    trainer = ConfigManager().parse_args([*chosen, *arguments]).build()
    losses, log = [], trainer.metrics_processor.log

    def logged(step: int, loss: float, *rest: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **more)

    trainer.metrics_processor.log = logged
    trainer.train()
    trainer.close()
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
    return {
        "state_bytes": state_bytes(optimizer).device,
        "gradient_bytes": sum(local(p).nbytes for p in model.parameters() if p.requires_grad),
        "losses": losses,
        "weights": {name: whole(value) for name, value in model.state_dict().items()},
        "state": {name: whole(value) for name, value in trainer.optimizers.state_dict().items()},
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "places": sorted({str(getattr(p, "placements", None)) for p in model.parameters()}),
    }
