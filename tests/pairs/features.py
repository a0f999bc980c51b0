"""What can be combined. Each feature is a step of building the model, its optimizer or its loop."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import grass
from tests.distributed.parallel_2d.decoders import decoder, ids, whole

MODES = ("dense", "compact")
EQUAL = ("DDP", "FSDP2", "offload", "streaming", "compile", "checkpointing", "step_in_backward")
"""Features that change no result but by the order of sums."""
OTHER = ("TP", "2D", "int8", "experts", "attach")
"""Features that train something else: other strata, rounded weights, another model or optimizer."""
FEATURES = EQUAL + OTHER
ON_RANKS = ("DDP", "FSDP2", "TP", "2D")
STEPS = 5
"""With a refresh every two steps."""
TOLERANCE = {"rtol": 1e-6, "atol": 1e-8}
"""Float64; routers and rotary embeddings compute in float32, and Adam's division magnifies what sums differ by."""
GRASS = str(Path(grass.__file__).parent)


def applies(mode: str, features: tuple[str, ...]) -> bool:
    """Whether there is a way to ask for these features together."""
    of_compact_mode = mode == "compact" or not {"int8", "attach"} & set(features)
    return of_compact_mode and not {"attach", "offload"} <= set(features)  # an option of GrassAdamW


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        answer: ``"yes"``, of a pair ``"equal"`` or ``"trains"``; or the type of the error, with ``"torch's "`` in front
            if Grass did not raise it.
        message: of the error.
        losses: of each step.
        weights: the whole ``state_dict`` at the end.
    """

    answer: str
    message: str = ""
    losses: tuple[float, ...] = ()
    weights: dict[str, Tensor] | None = None


def run(mode: str, features: tuple[str, ...]) -> Outcome:
    """Train with features, in this process or as one rank of two."""
    try:
        model, parallel, optimizer = built(mode, features)
        losses = train(parallel, optimizer, features)
        weights = whole(model.state_dict())
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        kind = type(error).__name__
        return Outcome(kind if where.startswith(GRASS) else f"torch's {kind}", str(error))
    return Outcome("yes", losses=tuple(losses), weights=weights)


def built(mode: str, features: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """The model, what is called in its place, and the optimizer, in the order of the documentation."""
    model = new_model(features)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")) if "TP" in features else None
    if mesh is not None:
        parallelize_module(model, mesh["tensor"], plan(features))
    if "2D" in features:
        grass.distributed.parallelize_2d(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns")))
    if mode == "compact":
        grass.compact(model, rank=0.25, explore=0.25, weights="int8" if "int8" in features else None)
    parallel = wrapped(model, None if mesh is None else mesh["data"], features)
    if "streaming" in features:
        grass.stream(model, device="cpu", units=["model.layers"])
    optimizer = optimizer_of(model, mode, features)
    if "compile" in features:
        parallel.compile(backend="aot_eager")
    return model, parallel, optimizer


def new_model(features: tuple[str, ...]) -> Any:
    """A decoder; with experts, a mixture of them."""
    if "experts" in features:
        model = decoder("mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    else:
        model = decoder()
    if "checkpointing" in features:
        model.gradient_checkpointing_enable()
        model.train()
    return model


def plan(features: tuple[str, ...]) -> dict[str, Any]:
    """Attention is divided, and the layers of a plain decoder."""
    styles = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    styles["model.layers.*.self_attn.o_proj"] = RowwiseParallel()
    if "experts" not in features:
        styles |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        styles["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    return styles


def wrapped(model: Any, mesh: Any, features: tuple[str, ...]) -> Any:
    """The model under data parallelism, FSDP2 over a mesh beside that of tensor parallelism."""
    if "FSDP2" in features:
        placement: Any = grass.distributed.shard_placement_fn(model)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, shard_placement_fn=placement)
        fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return DistributedDataParallel(model) if "DDP" in features else model


def optimizer_of(model: Any, mode: str, features: tuple[str, ...]) -> Any:
    """``GrassAdamW``, or torch's AdamW of a converted model."""
    if "attach" in features:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        grass.attach(optimizer, model, update_interval=2)
        if "step_in_backward" in features:
            grass.step_in_backward(optimizer)
        return optimizer
    parameters = model if mode == "compact" else grass.param_groups(model, rank=0.25, explore=0.25, dim=1)
    options: dict[str, Any] = {"offload": "cpu"} if "offload" in features else {}
    optimizer = grass.GrassAdamW(parameters, lr=1e-2, update_interval=2, **options)
    if "step_in_backward" in features:
        grass.step_in_backward(optimizer)
    return optimizer


def train(model: Any, optimizer: Any, features: tuple[str, ...]) -> list[float]:
    """The ordinary loop on this rank's part of the batch; on the whole batch where ranks share it."""
    losses = []
    for step in range(STEPS):
        tokens = ids(step % 2)
        if {"DDP", "FSDP2"} & set(features) and "TP" not in features and "2D" not in features:
            tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
