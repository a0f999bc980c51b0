"""Bases that transformers loads quantised: their linear layers stay as they are, experts that stay whole train."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import grass

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
EXPERTS = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


def torchao_int8() -> TorchAoConfig:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


def bitsandbytes(**bits: bool) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**bits)


BASES = {
    "4bit": (lambda: bitsandbytes(load_in_4bit=True), "Linear4bit is no plain linear layer"),
    "8bit": (lambda: bitsandbytes(load_in_8bit=True), "Linear8bitLt is no plain linear layer"),
    "torchao": (torchao_int8, "its weight is a Int8Tensor"),
}


def loaded(folder: Path, model_type: str, quantised: Any, **sizes: int) -> Any:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **sizes)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised, device_map="cpu")


@pytest.mark.parametrize("base", BASES)
def test_linear_layers_are_left_with_the_reason(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = BASES[base]
    model = loaded(tmp_path, "llama", config())
    with caplog.at_level(logging.WARNING, "grass"), pytest.raises(ValueError, match="can be converted"):
        grass.compact(model, rank=0.25)
    assert f"'model.layers.0.mlp.up_proj': {reason}" in caplog.text


@pytest.mark.parametrize("base", BASES)
def test_experts_of_a_quantised_mixture_train(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = BASES[base]
    model = loaded(tmp_path, "mixtral", config(), num_local_experts=4, num_experts_per_tok=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "grass"):
        assert grass.compact(model, rank=0.25) == EXPERTS
    assert f"'model.layers.0.self_attn.q_proj': {reason}" in caplog.text
    optimizer = grass.GrassAdamW(model, lr=1e-2)
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    state = model.state_dict()
    assert all(not torch.equal(state[name], before[name]) for name in EXPERTS)
