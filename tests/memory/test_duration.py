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
