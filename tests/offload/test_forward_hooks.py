"""Every parameter is up to date when code reads it, whichever module it calls for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grass import GrassAdamW
from tests.offload.models import (
    BATCHES,
    DENSE_MODES,
    EVERY_MODE,
    SLOW,
    base_and_head,
    evaluated,
    optimizer_for,
    step,
    steps,
    whole,
)
from tests.offload.training import same

Body = Callable[[Any, GrassAdamW], Any]
Build = Callable[..., nn.Module]


def assert_as_resident(build: Callable[[], nn.Module], mode: str, body: Body) -> None:
    """``body`` returns the same with and without offload."""
    results = []
    for offload in (None, SLOW):
        model = build()
        results.append(body(model, optimizer_for(model, mode, offload)))
    assert same(*results)


def base_only(model: Any, optimizer: GrassAdamW) -> Any:
    return steps(model, optimizer, loss=base_and_head), dict(model.state_dict())


def whole_then_base(model: Any, optimizer: GrassAdamW) -> list[float]:
    steps(model, optimizer, 2)
    return [[step(model, optimizer, i), evaluated(model, base_and_head)] for i in range(3)]  # type: ignore[return-value]


def whole_then_parts(model: Any, optimizer: GrassAdamW) -> list[Tensor]:
    """Parts called by themselves, one after each step."""
    parts = [lambda: model.lm_head(torch.ones(32)), lambda: model.model.norm(torch.ones(1, 32))]
    parts += [lambda: model.model.embed_tokens(BATCHES[0]), lambda: model.model.layers[1].mlp(torch.ones(1, 32))]
    found = []
    steps(model, optimizer, 2)
    for i, part in enumerate(parts):
        step(model, optimizer, i)
        if i == len(parts) - 1:  # a part of a block by itself is not guarded: its layers are, in compact mode
            model.model.layers[1](torch.ones(1, 1, 32), position_embeddings=(torch.ones(1, 1, 8),) * 2)
        found.append(part().detach())
    return found


def evaluation_in_between(model: Any, optimizer: GrassAdamW) -> list[float]:
    return [value for i in range(5) for value in (step(model, optimizer, i), evaluated(model))]


def inference(model: Any, optimizer: GrassAdamW) -> list[float]:
    """Sketches begin while values arrive: under ``inference_mode`` they must be ordinary tensors."""
    losses = []
    for i in range(6):
        losses.append(step(model, optimizer, i))
        with torch.inference_mode():
            losses.append(whole(model, BATCHES[i]).item())
    return losses


def generation(model: Any, optimizer: GrassAdamW) -> list[Any]:
    tokens = []
    for i in range(3):
        step(model, optimizer, i)
        model.eval()
        tokens.append(model.generate(BATCHES[i], max_new_tokens=3, do_sample=False, pad_token_id=0).tolist())
        model.train()
    return tokens


def checkpointing(reentrant: bool) -> Body:
    def body(model: Any, optimizer: GrassAdamW) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return steps(model.train(), optimizer), dict(model.state_dict())

    return body


def loading(model: Any, optimizer: GrassAdamW) -> Any:
    """Loaded weights are not overwritten by values that were on their way."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    steps(model, optimizer, 3)
    model.load_state_dict(saved)
    return steps(model, optimizer, 3), dict(model.state_dict())


READERS: dict[str, Body] = {
    "base only": base_only,
    "whole, then base": whole_then_base,
    "whole, then parts": whole_then_parts,
    "evaluation": evaluation_in_between,
    "inference_mode": inference,
    "generate": generation,
    "reentrant checkpoints": checkpointing(True),
    "checkpoints": checkpointing(False),
    "loading": loading,
}


@pytest.mark.parametrize(
    "tied", [pytest.param(False, id="untied", marks=pytest.mark.slow), pytest.param(True, id="tied")]
)
@pytest.mark.parametrize("body", READERS)
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_language_model(mode: str, body: str, tied: bool, tiny_llama: Build) -> None:
    assert_as_resident(lambda: tiny_llama(tie_word_embeddings=tied), mode, READERS[body])


class Halves(nn.Module):
    """Never called as a whole; one parameter belongs to no module, one block's weight is another's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.decoder = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])})
        self.decoder.blocks[2].weight = self.decoder.blocks[0].weight
        self.read_only = nn.ModuleList([nn.Linear(16, 64)])  # its item is never called
        self.decode = _Decoder(self.decoder.blocks, self.read_only)


class _Decoder(nn.Module):
    def __init__(self, blocks: Any, heads: Any) -> None:
        super().__init__()
        self.blocks, self.heads = blocks, heads

    def forward(self, h: Tensor, bias: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.linear(h, self.heads[0].weight, bias)


@pytest.mark.parametrize("as_one", [False, True], ids=["two calls", "one call"])
@pytest.mark.parametrize("mode", DENSE_MODES)
def test_parameters_in_unusual_places(mode: str, as_one: bool) -> None:
    results = []
    for offload in (None, SLOW):
        model = Halves()
        free = nn.Parameter(torch.zeros(64))
        optimizer = optimizer_for(model, mode, offload)
        optimizer.add_param_group({"params": [free] if mode == "full" else [("free", free)], "rank": None})
        hidden = BATCHES[0]

        def loss(model: Any, x: Tensor, free: Tensor = free) -> Tensor:
            hidden = F.embedding(x, model.encoder[0].weight.detach()) if as_one else model.encoder(x)
            return F.cross_entropy(model.decode(hidden, free).flatten(0, 1), x.flatten())

        losses = steps(model, optimizer, 6, loss)
        results.append((losses, dict(model.state_dict()), free.detach().clone(), hidden))
        if offload is not None:
            assert optimizer.offload is not None
            assert not optimizer.offload._hooks.guards(free)
    assert same(*results)
