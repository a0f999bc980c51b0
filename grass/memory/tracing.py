"""What a model's blocks hold while they run forward and backward, counted on tensors without contents."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grass.private_names import (
    FakeTensorMode,
    TorchDispatchMode,
    attends_by_interface,
    set_attention,
    storage_key,
    tree_leaves,
)

BLOCKS = 2
"""Blocks that are traced: what the last one adds every other one adds too."""


class Traced(NamedTuple):
    """Bytes, for one batch.

    Attributes:
        block: that a block saves for backward.
        block_input: of a block's input: all that checkpointing saves of it.
        temporaries: that backward through a block holds at most beside what was saved and gradients of weights.
        ends: saved by everything else: rotary tables, the last norm, the head's input.
        loss: most that is added from the last norm on: whole logits and gradients with respect to them.
    """

    block: float
    block_input: float
    temporaries: float
    ends: float
    loss: float


class Tracer:
    """Traces of the models of one configuration, each made once.

    Sequences are traced at powers of two. Between two of them every count is taken for ``a S + b S^2``, which is exact
    where attention keeps nothing of ``S x S`` elements and where all that is kept does; over batches it is linear.

    Args:
        config: of ``transformers``.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self._models: dict[torch.dtype, Any] = {}
        self._traced: dict[tuple[Any, ...], Traced] = {}

    def __call__(
        self, batch_size: int, seq_len: int, dtype: torch.dtype, *, linears: bool, others: bool = True
    ) -> Traced:
        """What :func:`trace` counts.

        Raises:
            ValueError: the model does not run on fake tensors.
        """

        def at(sequences: int, length: int) -> Traced:
            key = (sequences, length, dtype, linears, others)
            if key not in self._traced:
                self._traced[key] = self._trace(*key)
            return self._traced[key]

        def batched(length: int) -> Traced:
            one = at(1, length)
            if batch_size == 1:
                return one
            return Traced(*(a + (batch_size - 1) * (b - a) for a, b in zip(one, at(2, length), strict=True)))

        power = 2 ** (seq_len.bit_length() - 1)
        if power == seq_len:
            return batched(power)
        t = seq_len / power
        pairs = zip(batched(power), batched(2 * power), strict=True)
        return Traced(*((2 * low - high / 2) * t + (high / 2 - low) * t * t for low, high in pairs))

    def _trace(self, sequences: int, length: int, dtype: torch.dtype, linears: bool, others: bool) -> Traced:
        try:
            if dtype not in self._models:
                self._models[dtype] = fake_model(self.config, dtype)
            return trace(self._models[dtype], sequences, length, linears=linears, others=others)
        except Exception as error:  # whatever a model's code raises
            raise ValueError(
                f"No plan for model_type={self.config.model_type!r}: it does not run on tensors without contents: "
                f"{type(error).__name__}: {error}"
            ) from error


def fake_model(config: Any, dtype: torch.dtype) -> Any:
    """A model of :data:`BLOCKS` blocks of a ``transformers`` configuration, on fake tensors, in training mode."""
    from transformers import AutoModelForCausalLM

    config = with_causal_attention(config)
    config.num_hidden_layers = BLOCKS
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.train()


def trace(model: Any, batch_size: int, seq_len: int, *, linears: bool, others: bool) -> Traced:
    """Run a :func:`fake_model` forward and backward.

    Args:
        model: which is given back without hooks and gradients.
        batch_size: sequences.
        seq_len: tokens in each.
        linears: whether the blocks' matrices train, and so save their inputs.
        others: whether norms and biases do.

    Embeddings and head are frozen; a gradient flows to the embedding's output all the same.
    """
    blocks = blocks_of(model)
    model.requires_grad_(False)
    for p in blocks.parameters():
        p.requires_grad_(linears)
    for p in model.parameters():
        if p.ndim == 1:
            p.requires_grad_(others)
    run = _Run(model)
    hooks = [
        model.get_input_embeddings().register_forward_hook(_require_grad),
        blocks[-1].register_forward_pre_hook(run.note_input, with_kwargs=True),
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: run.note("forward")),
        blocks[-1].register_full_backward_pre_hook(lambda *_: run.note("loss")),
        blocks[-2].register_full_backward_pre_hook(lambda *_: run.note("block")),
    ]
    try:
        with next(model.parameters()).fake_mode, run.live:
            ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    block = run.now["loss"] - run.now["block"]
    return Traced(
        block,
        run.input,
        run.most["block"] - run.now["loss"] + run.input,
        run.now["forward"] - BLOCKS * block,
        run.most["loss"] - run.now["forward"],
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while they are alive.

    Attributes:
        now: bytes alive.
        most: the most that was alive since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of what it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def ignore(self, tensor: Tensor) -> None:
        """Never count a tensor that was there before."""
        self._known.add(storage_key(tensor.untyped_storage()))

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _Run:
    """Counts of one forward and backward: at moments that have names, and the most since the moment before."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.live, self.input = model, LiveBytes(), 0
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self.live.ignore(tensor)

    def note(self, moment: str) -> None:
        gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.now[moment], self.most[moment] = self.live.now - gradients, self.live.most - gradients
        self.live.most = self.live.now

    def note_input(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input = (args[0] if args else kwargs["hidden_states"]).nbytes


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The model's blocks, one after another: its longest ``ModuleList``.

    Raises:
        ValueError: there is none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no ModuleList of blocks")
    return max(lists, key=len)


def with_causal_attention(config: Any) -> Any:
    """A copy of the configuration whose models attend as they do to sequences without padding.

    On fake tensors transformers cannot see that there is none, and would make a mask for scaled-dot-product attention.
    Models that do not run it, for which attention is not exchangeable, attend as they do by default.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface

    config = copy.deepcopy(config)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if attends_by_interface(kind):
        AttentionInterface.register("causal_sdpa", _causal_attention)
        set_attention(config, "causal_sdpa")
    return config


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    grouped = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _require_grad(embedding: nn.Module, args: Any, out: Tensor) -> Tensor:
    """The same values, as if the embedding trained; a leaf would stay alive until the end."""
    return out + torch.zeros((), dtype=out.dtype, requires_grad=True)
