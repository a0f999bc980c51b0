"""How a model would be trained: everything beside its shape that decides its memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from grass.memory.architecture import Architecture
from grass.options import check_value, resolve_rank
from grass.selection.exploration import resolve_explore
from grass.selection.rules import check_rule, needs_norms
from grass.state.master import SMALL, is_half

MOMENTS = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4 / 256}
"""Bytes per element of Adam's moments of selected rows (:mod:`grass.state.precision`)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training run.

    Attributes:
        rank: rows or columns per weight, a number or a fraction; of GaLore too.
        lora_rank: of LoRA's and QLoRA's adapters.
        explore: other rows or columns that Grass moves in each step, without moments; ``None``: as many as ``rank``,
            at most those that are left.
        selection: Grass's rule. One that reads gradient norms needs steps that gather a sketch.
        dim: Grass selects rows (0) or columns (1).
        state_policy: Grass's moments at a refresh: ``"reset"``, ``"keep"`` or ``"bank"``.
        moment_dtype: precision of Grass's moments of selected rows, one of :data:`MOMENTS`.
        bank_dtype: precision of the bank in host memory.
        dtype: of the weights, of arithmetic, and of what AdamW and GaLore hold.
        active_dtype: of Grass's active rows, and of LoRA's adapters and their moments.
        batch_size: sequences per forward.
        seq_len: tokens per sequence.
        checkpointing: keep decoder layers' inputs alone and run each layer's forward again in backward.
        chunk_tokens: tokens whose logits the loss holds at a time; 0 for all.
        sketch_size: columns of the sketch from which Grass chooses rows.
        offload: AdamW and Grass keep moments, and copies of weights and gradients, in host memory and step there.
        masters: with ``offload``, all parameters that are stepped whole have float32 masters and moments on the host,
            not only small ones (:mod:`grass.state.master`).
        files: with ``offload``, what ``grass.Offload(path=...)`` puts there lies in files.
        stream: with ``offload``, the blocks visit the device one by one (:func:`grass.stream`).
        cache: bytes of blocks that then stay on the device.
        host_activations: the inputs of blocks then wait on the host for backward.
        shards: devices that ``fully_shard`` divides the model among, block by block.
        slack: allocator slack: what rounding and fragmentation add to the peak, as a fraction of it.
    """

    rank: int | float = 256
    lora_rank: int = 16
    explore: int | float | None = None
    selection: str = "uniform"
    dim: int = 1
    state_policy: str = "keep"
    moment_dtype: str = "float32"
    bank_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    active_dtype: torch.dtype = torch.float32
    batch_size: int = 1
    seq_len: int = 2048
    checkpointing: bool = True
    chunk_tokens: int = 256
    sketch_size: int = 32
    offload: bool = False
    masters: bool = False
    files: bool = False
    stream: bool = False
    cache: int = 0
    host_activations: bool = False
    shards: int = 1
    slack: float = 0.02

    def __post_init__(self) -> None:
        check_value("rank", self.rank)
        check_value("explore", self.explore)
        check_rule(self.selection, False)
        check_value("state_policy", self.state_policy)
        if self.rank is None or self.dim not in (0, 1):
            raise ValueError(f"Invalid rank={self.rank} or dim={self.dim!r}: must be a rank, and 0 or 1")
        if self.moment_dtype not in MOMENTS:
            raise ValueError(f"Invalid moment_dtype={self.moment_dtype!r}: must be one of {', '.join(MOMENTS)}")
        for name, least in (
            ("lora_rank", 1),
            ("batch_size", 1),
            ("seq_len", 1),
            ("chunk_tokens", 0),
            ("sketch_size", 1),
            ("cache", 0),
            ("shards", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"Invalid {name}={getattr(self, name)}: must be >= {least}")
        if not 0 <= self.slack < 1:
            raise ValueError(f"Invalid slack={self.slack}: must be in [0, 1), a fraction of the peak")
        if self.stream and not (self.offload and self.checkpointing):
            raise ValueError("Invalid stream=True: needs offload and checkpointing, which a streamed model always has")
        if self.active_dtype not in (self.dtype, torch.float32):
            raise ValueError(
                f"Invalid active_dtype={self.active_dtype}: must be torch.float32, or that of the weights, {self.dtype}"
            )
        if self.masters and not self.offload:
            raise ValueError("Invalid masters=True: only with offload=True")
        if self.shards > 1:
            self._check_shards()
        if not self.stream and (self.cache or self.host_activations):
            given = f"cache={self.cache} or host_activations={self.host_activations}"
            raise ValueError(f"Invalid {given}: only with stream=True")

    def _check_shards(self) -> None:
        """Raise ``ValueError`` for what FSDP2 does not take, or what has no plan there."""
        for name, taken, allowed in (
            ("active_dtype", self.active_dtype == self.dtype, self.dtype),
            ("offload", not self.offload, "False"),
            ("moment_dtype", self.moment_dtype != "8bit", "float32 or bfloat16"),
            ("selection", not self.gathers_sketch, "a rule that reads no norms, such as uniform,"),
        ):
            if not taken:
                given = f"{name}={getattr(self, name)} with shards={self.shards}"
                raise ValueError(f"Invalid {given}: only {allowed} is planned")

    def has_master(self, elements: int) -> bool:
        """Whether a parameter of this size that is stepped whole has a float32 master: small ones, and with masters."""
        return is_half(self.dtype) and (self.masters or elements <= SMALL)

    def check(self, model: Architecture) -> None:
        """Raise ``ValueError`` where the model cannot be trained, or planned for, in this way."""
        if any(linear.experts > 1 for linear in model.linears):
            self._check_experts()
        largest = self.largest_rank(model)
        if isinstance(self.rank, int) and self.rank > largest:
            raise ValueError(f"Invalid rank={self.rank}: must be at most {largest} for this model and dim={self.dim}")
        left = largest - self.rank_of(largest)
        if self.explored_of(largest) > left:
            raise ValueError(
                f"Invalid explore={self.explore}: must be a fraction, or at most {left} for this model, "
                f"rank={self.rank} and dim={self.dim}"
            )
        if model.window is not None and self.seq_len > model.window:
            raise ValueError(
                f"Invalid seq_len={self.seq_len}: beyond the sliding window of {model.window} tokens attention takes a "
                "mask of seq_len^2 elements, which has no plan"
            )
        if model.positions is not None and self.seq_len > model.positions:
            raise ValueError(
                f"Invalid seq_len={self.seq_len}: must be at most {model.positions}, the positions that this model "
                "learns"
            )
        if model.scales_logits and self.chunk_tokens:
            raise ValueError(
                f"Invalid chunk_tokens={self.chunk_tokens}: this model does more to its logits than its head, and its "
                "loss cannot be chunked: must be 0"
            )

    def _check_experts(self) -> None:
        if self.moment_dtype == "8bit":
            raise ValueError("Invalid moment_dtype='8bit': does not take experts, so must be 'float32' or 'bfloat16'")
        if self.dtype != torch.bfloat16:
            raise ValueError(
                f"Invalid dtype={self.dtype}: models with experts are planned in torch.bfloat16 only, because their "
                "products have no other on tensors without contents"
            )

    def lowered(self, model: Architecture, names: Collection[str]) -> tuple[Setting, dict[str, str]]:
        """This setting with the fields ``names`` lowered to what the model allows, and why each that changed did."""
        positions = [(n, f"this model learns {n:,} positions") for n in [model.positions] if n is not None]
        windows = [(n, f"attention has a window of {n:,} tokens") for n in [model.window] if n is not None]
        limits = {
            "rank": (self.largest_rank(model), "this model's narrowest layer allows no more"),
            "seq_len": min(positions + windows, default=(self.seq_len, "")),
            "chunk_tokens": (0 if model.scales_logits else self.chunk_tokens, "this model's loss cannot be chunked"),
        }
        changes = {name: limits[name] for name in names if name in limits and getattr(self, name) > limits[name][0]}
        values: dict[str, Any] = {name: value for name, (value, _) in changes.items()}
        return replace(self, **values), {name: reason for name, (_, reason) in changes.items()}

    def largest_rank(self, model: Architecture) -> int:
        """The rank that the narrowest of the model's linear layers allows."""
        return min(linear.size(self.dim) for linear in model.linears)

    def rank_of(self, size: int) -> int:
        """Rows of a dimension of this size."""
        return resolve_rank(self.rank, size)

    def explored_of(self, size: int) -> int:
        """Explored rows of a dimension of this size."""
        return resolve_explore(self.explore, self.rank_of(size), size)

    @property
    def gathers_sketch(self) -> bool:
        """Whether the step before a refresh gathers a sketch of the gradient."""
        return needs_norms(self.selection)

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch_size * self.seq_len
