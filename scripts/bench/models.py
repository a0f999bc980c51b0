"""What Grass covers of the architectures people train: small models of transformers, built from their configurations.

    python scripts/bench/models.py           # rewrites benchmarks/models.csv, in about a minute

For each: the share of the parameters that dense and compact mode cover, and the bytes of gradients and optimizer state
as a share of AdamW's, with an eighth of each weight selected and an eighth explored. ``tests/experts/test_models.py``
checks that each trains, saves, is read by ``from_pretrained`` and resumes exactly.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import pandas as pd
import torch
import transformers
from provenance import write
from torch import Tensor, nn

import grass
from grass.command_line import ArgumentParser
from grass.coverage import silent
from grass.memory import state_bytes
from grass.targets import matched_experts

RANK, EXPLORE = 1 / 8, 1 / 8
VOCABULARY = 256

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
ENCODER = {key: BASE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
HEADS = {**BASE, "head_dim": 16}
IMAGES = {**ENCODER, "image_size": 16, "patch_size": 4}
MIXTURE = {**HEADS, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 8}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", BASE),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS),
    "Phi": ("PhiForCausalLM", "PhiConfig", BASE),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**ENCODER, "ffn_dim": 128, "vocab_size": VOCABULARY, "word_embed_proj_dim": 64},
    ),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {**ENCODER, "vocab_size": VOCABULARY}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**ENCODER, "vocab_size": VOCABULARY}),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**IMAGES, "num_labels": 10}),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**ENCODER, "vocab_size": VOCABULARY, "projection_dim": 32, "eos_token_id": 1},
            "vision_config": {**IMAGES, "projection_dim": 32},
            "projection_dim": 32,
        },
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": VOCABULARY,
            "max_source_positions": 16,
            "num_mel_bins": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MIXTURE, "num_local_experts": 8}),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **MIXTURE,
            **LATENT,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    ),
    "Mamba 2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 64,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "chunk_size": 8,
        },
    ),
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **BASE,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
}
"""Model class, configuration class, and what the configuration is given."""


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/models.csv"))
    args = parser.parse_args(argv)
    rows = [measure(name) for name in MODELS]
    write(pd.DataFrame(rows), args.out, rank=RANK, explore=EXPLORE, transformers=transformers.__version__)


def build(name: str, seed: int = 0) -> Any:
    """A model from its configuration, without dropout."""
    model, config, values = MODELS[name]
    torch.manual_seed(seed)
    options = copy.deepcopy(getattr(transformers, config)(**copy.deepcopy(values)))
    built: nn.Module = getattr(transformers, model)(options)
    for part in built.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return built.train()


def inputs(name: str, step: int = 0) -> dict[str, Tensor]:
    """What the model's forward takes to return a loss."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (4, 16), generator=generator)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    if name == "ViT":
        return {"pixel_values": images, "labels": torch.arange(4)}
    if name == "CLIP":
        ids[:, -1] = 1
        return {"pixel_values": images, "input_ids": ids}
    if name == "Whisper":
        return {"input_features": torch.randn(4, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def loss(model: Any, name: str, step: int = 0) -> Tensor:
    """The loss of one batch."""
    options = {"return_loss": True} if name == "CLIP" else {}
    value: Tensor = model(**inputs(name, step), **options).loss
    return value


def measure(name: str) -> dict[str, Any]:
    """The row of one model."""
    total = sum(p.numel() for p in build(name).parameters())
    adamw_gradients, adamw_state = bytes_of(name, "adamw")
    row: dict[str, Any] = {"model": name, "parameters": total, "experts": int(bool(matched_experts(build(name))))}
    for mode in ("dense", "compact"):
        gradients, state = bytes_of(name, mode)
        row[f"{mode}_covered"] = round(covered(name, mode) / total, 4)
        row[f"{mode}_gradients"] = round(gradients / adamw_gradients, 4)
        row[f"{mode}_state"] = round(state / adamw_state, 4)
    return row


def optimizer_of(model: nn.Module, mode: str, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of a mode: ``"adamw"``, ``"dense"`` or ``"compact"``."""
    values: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.0, **options}
    with silent():
        if mode == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        if mode == "dense":
            return grass.GrassAdamW(grass.param_groups(model, rank=RANK, explore=EXPLORE), **values)
        grass.compact(model, rank=RANK, explore=EXPLORE)
        return grass.GrassAdamW(model, **values)


def covered(name: str, mode: str) -> int:
    """Elements of the weights that are trained by rows."""
    model = build(name)
    before = {key: p.numel() for key, p in model.named_parameters()}
    if mode == "dense":
        with silent():
            return sum(p.numel() for _, p in grass.param_groups(model, rank=RANK)[0]["params"])
    with silent():
        grass.compact(model, rank=RANK, explore=EXPLORE)
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    return sum(before[key] for key in frozen)


def bytes_of(name: str, mode: str) -> tuple[int, int]:
    """Bytes of gradients and of optimizer state after a step."""
    model = build(name)
    optimizer = optimizer_of(model, mode)
    loss(model, name).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return gradients, state_bytes(optimizer).device


if __name__ == "__main__":
    main()
