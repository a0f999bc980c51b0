"""Operations of a token, against torch's counter on a model that trains."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import grass
from grass.memory import Architecture, Setting
from grass.memory.__main__ import main
from grass.memory.duration import days, flops_per_token
from grass.memory.llama import llama_config

TOKENS = 2 * 16


def counted(model):
    """Operations of all products but attention's, in forward and backward of one batch."""
    ids = torch.randint(50, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    products = {op: n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    return sum(products.values())


def small_llama(*, checkpointing):
    import transformers

    config = llama_config("1m", vocab_size=50, max_seq_len=16)
    model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    if checkpointing:
        model.activation_checkpointing_enable()
    return model.train(), config


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("method", "rank"), [("AdamW", 16), ("Grass", 16), ("Grass", 0.25)])
def test_operations_of_a_token(method, rank, checkpointing):
    model, config = small_llama(checkpointing=checkpointing)
    if method == "Grass":
        grass.compact(model, rank=rank)
    found = counted(model) / TOKENS
    setting = Setting(rank=rank, seq_len=16, checkpointing=checkpointing, chunk_tokens=0)
    architecture = Architecture.from_config(config)
    assert found == pytest.approx(flops_per_token(method, architecture, setting), rel=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_that_are_not_converted(checkpointing):
    """A token counts with those that it is sent to, and with the router, which trains whole."""
    from transformers import Llama4TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 50}
    config = Llama4TextConfig(**sizes, **experts, **heads, no_rope_layers=[1, 1], attention_chunk_size=64)
    architecture = Architecture.from_config(config)
    assert all(linear.experts == 1 for linear in architecture.linears)
    one, router, converted = 3 * 64 * 32, 8 * 64, architecture.layer_matrix
    others = 2 * one + router
    assert architecture.other_used == others
    assert converted == 4 * 64 * 64 + one, "attention and the expert that all tokens share"
    assert architecture.flops_elements == converted + others
    passes = 8 if checkpointing else 6
    last = 2 * architecture.linears[-1].elements if checkpointing else 0  # its forward is not repeated
    setting = Setting(rank=16, seq_len=16, checkpointing=checkpointing, chunk_tokens=0)
    expected = 2 * (passes * (converted + others) - last) + 6 * 64 * 50
    assert flops_per_token("AdamW", architecture, setting) == expected


def test_adapters_train_little():
    architecture = Architecture.from_config(llama_config("60m", vocab_size=1000, max_seq_len=64))
    setting = Setting(rank=64, seq_len=64)
    lora, adamw = (flops_per_token(method, architecture, setting) for method in ("LoRA", "AdamW"))
    assert 0.7 < lora / adamw < 0.85  # forward, forward again and the inputs' gradients are 6 of 8 parts


def test_days():
    architecture = Architecture.from_config(llama_config("60m", vocab_size=1000, max_seq_len=64))
    setting = Setting(rank=64, seq_len=64)
    flops = flops_per_token("AdamW", architecture, setting)
    assert days("AdamW", architecture, setting, 1e9, 2.0) == pytest.approx(1e9 * flops / 2e12 / 86400)


def test_command(capsys):
    main(["--model", "60m", "--tokens", "1.2B", "--tflops", "10"])
    assert "days, 1.2e+09 tokens, 10 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "1B"], "go together"),
        (["--tflops", "1"], "go together"),
        (["--tokens", "0", "--tflops", "1"], "must be > 0"),
        (["--tokens", "1B", "--tflops", "-1"], "must be > 0"),
        (["--tokens", "many", "--tflops", "1"], "Invalid count 'many'"),
    ],
)
def test_budgets_that_are_none(flags, message, capsys):
    with pytest.raises(SystemExit):
        main(["--model", "60m", *flags])
    assert message in capsys.readouterr().err
