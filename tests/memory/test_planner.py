"""What plans promise: 13B on one GPU, and the order of things that any true plan has."""

import dataclasses
import math
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    RecurrentGemmaConfig,
    T5Config,
    ViTConfig,
)

import grass
from grass.memory import METHODS, Architecture, Setting, parse_bytes, plan
from grass.memory.fits import Largest, largest_that_fit
from grass.memory.tracing import Tracer, fake_model, trace
from tests.memory.architectures import CAPPED, KINDS, LLAMA_1B, LLAMA_7B, LLAMA_13B, LLAMA_60M


def test_13b_fits_40_gb_with_float32_active_rows_and_moments():
    setting = Setting(rank=192, seq_len=2048, active_dtype=torch.float32, moment_dtype="float32", state_policy="keep")
    assert plan("Grass", LLAMA_13B, setting).total <= parse_bytes("40GB")
    others = ("AdamW", "8-bit AdamW", "GaLore")
    assert all(plan(method, LLAMA_13B, setting).total > parse_bytes("40GB") for method in others)


def test_13b_fits_24_gb_in_8_bits():
    setting = Setting(rank=160, seq_len=2048, active_dtype=torch.float32, moment_dtype="8bit", state_policy="keep")
    assert plan("Grass int8", LLAMA_13B, setting).total <= parse_bytes("24GB")
    assert plan("Grass", LLAMA_13B, setting).total > parse_bytes("24GB")


def test_7b_fits_24_gb_and_in_8_bits_12_gb():
    assert plan("Grass", LLAMA_7B, Setting(rank=224, state_policy="keep")).total <= parse_bytes("24GB")
    assert plan(
        "Grass int8", LLAMA_7B, Setting(rank=96, state_policy="keep", moment_dtype="8bit")
    ).total <= parse_bytes("12GB")


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_and_rows_count_what_is_explored_and_moments_do_not(dim):
    """The table of bytes of docs/memory.md, for every weight of a model at once; float32 throughout."""
    model = LLAMA_60M
    plans = {
        q: plan("Grass", model, Setting(rank=32, explore=q, dim=dim, dtype=torch.float32)) for q in (0, 32, None, 64)
    }
    width = model.layers * sum(linear.n if dim == 0 else linear.m for linear in model.linears)
    of_32_rows, linears = 4 * 32 * width, model.layers * len(model.linears)
    assert plans[None] == plans[32]
    for q, times in ((32, 1), (64, 2)):
        assert plans[q].gradients - plans[0].gradients == times * of_32_rows
        assert plans[q].active_rows - plans[0].active_rows == times * (of_32_rows + 8 * 32 * linears)
        assert plans[q].moments == plans[0].moments
    saved = plans[64].activations - plans[0].activations
    assert saved == (0 if dim == 0 else 4 * 64 * 2048 * len(model.linears))  # of the one layer that is recomputed


def test_all_that_are_left_explored_is_a_whole_gradient():
    model = LLAMA_60M
    grass_, adamw = (
        plan(name, model, Setting(rank=64, explore=1.0, dtype=torch.float32)) for name in ("Grass", "AdamW")
    )
    assert grass_.gradients == adamw.gradients


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "more",
    [{"rank": 512}, {"batch_size": 2}, {"seq_len": 4096}, {"checkpointing": False}],
    ids=lambda more: "-".join(more),
)
def test_more_of_anything_never_takes_less(method, more):
    for checkpointing in (True, False):
        setting = Setting(checkpointing=checkpointing)
        for model in (LLAMA_13B, LLAMA_60M):
            larger = dataclasses.replace(setting, **more)
            assert plan(method, model, larger).peak >= plan(method, model, setting).peak


def test_weights_gradients_and_moments_of_adamw_are_those_of_every_parameter():
    for kind in ("llama-tied", "gpt2"):
        model = Architecture.from_config(KINDS[kind])
        adamw = plan("AdamW", model, Setting(rank=8, seq_len=256, chunk_tokens=0))
        assert adamw.weights == adamw.gradients == adamw.moments / 2 == 2 * model.parameters


def test_the_bank_holds_all_moments_and_is_not_on_the_device():
    bank, keep = (plan("Grass", LLAMA_7B, Setting(state_policy=policy)) for policy in ("bank", "keep"))
    assert (keep.bank, bank.peak) == (0, keep.peak)
    elements = LLAMA_7B.layers * LLAMA_7B.layer_matrix
    assert bank.bank == pytest.approx(2 * 4 * elements, rel=0.001)
    halved = plan("Grass", LLAMA_7B, Setting(state_policy="bank", bank_dtype=torch.bfloat16)).bank
    assert halved == pytest.approx(bank.bank / 2, rel=0.001)


@pytest.mark.parametrize(
    ("method", "dtype"), [("AdamW", torch.float32), ("Grass", torch.float32), ("Grass", torch.bfloat16)]
)
def test_host_bytes_are_those_of_an_offloaded_optimizer(method, dtype):
    """After a step of a small model, by counting the copies and the state."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    setting = Setting(rank=8, explore=4, dtype=dtype, seq_len=16, chunk_tokens=0, offload=True)
    planned = plan(method, Architecture.from_config(config), setting)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if method == "Grass":
        grass.compact(model, rank=8, explore=4, dtype=torch.float32)
    optimizer = grass.GrassAdamW(model.named_parameters() if method == "AdamW" else model, offload="cpu")
    tokens = torch.arange(16).view(1, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.offload.finish()
    copies = [record.copy for record in optimizer.offload._records.values()]
    layers = [copy.layer for copy in copies if copy.layer is not None]
    own = sum(copy.host.nbytes for copy in copies if copy.layer is None)
    assert planned.host.weights == own + sum(layer.weight.nbytes for layer in layers)
    assert planned.host.active_rows == sum(layer.active.nbytes + layer.chosen.nbytes for layer in layers)
    assert planned.host.gradients == sum(copy._grad.nbytes for copy in copies)
    steps = 4 * sum("indices" not in state for state in optimizer.state.values())
    state = grass.memory.state_bytes(optimizer).host - steps
    assert planned.host.moments + planned.host.masters == state  # small parameters in half precision have masters
    assert (planned.host.masters > 0) == (dtype == torch.bfloat16)
    assert planned.moments == 0
    resident = plan(method, Architecture.from_config(config), dataclasses.replace(setting, offload=False))
    assert (resident.on_host, resident.moments) == (0, state)
    assert resident.peak > planned.peak


def test_only_rules_that_read_norms_pay_for_a_sketch():
    plans = {rule: plan("Grass", LLAMA_1B, Setting(selection=rule)) for rule in grass.available_rules()}
    assert Setting().gathers_sketch is False
    for rule, planned in plans.items():
        assert planned.peak_at.endswith("of a refresh step") == (rule not in ("uniform", "balanced"))
        assert (planned.peak > plans["uniform"].peak) == (rule not in ("uniform", "balanced"))


@pytest.mark.parametrize("method", [m if m == "Grass" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_the_largest_that_fits_fits_and_the_next_does_not(method):
    model, setting, gpu = LLAMA_1B, Setting(rank=128), parse_bytes("18GB")
    found = largest_that_fit(method, model, setting, gpu)

    def total(**changes):
        return plan(method, model, dataclasses.replace(setting, **changes)).total

    if found.batch_size is None:
        assert total() > gpu
        return
    assert total(batch_size=found.batch_size) <= gpu < total(batch_size=found.batch_size + 1)
    assert total(seq_len=found.seq_len) <= gpu < total(seq_len=found.seq_len + 128)
    if method.startswith("Grass"):
        limited = largest_that_fit(method, model, dataclasses.replace(setting, explore=1024), parse_bytes("100GB"))
        assert limited.rank == 1024  # of 2,048 columns
    if found.rank is None:
        assert "AdamW" in method
    else:
        name = "lora_rank" if "LoRA" in method else "rank"
        assert total(**{name: found.rank}) <= gpu
        assert found.rank == 2048 or total(**{name: found.rank + 8}) > gpu


def test_nothing_fits_next_to_nothing():
    assert largest_that_fit("Grass", LLAMA_13B, Setting(), parse_bytes("2GB")) == Largest(None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"rank": None}, "rank=None"),
        ({"dim": 2}, "dim=2"),
        ({"explore": -1}, "explore=-1"),
        ({"explore": 1.5}, "explore=1.5"),
        ({"selection": "largest"}, "selection 'largest'"),
        ({"state_policy": "forget"}, "state_policy='forget'"),
        ({"moment_dtype": "int4"}, "moment_dtype='int4': must be one of float32, bfloat16, 8bit"),
        ({"batch_size": 0}, "batch_size=0: must be >= 1"),
        ({"seq_len": 0}, "seq_len=0: must be >= 1"),
        ({"chunk_tokens": -1}, "chunk_tokens=-1: must be >= 0"),
        ({"slack": -0.1}, r"slack=-0.1: must be in \[0, 1\), a fraction"),
        ({"slack": 5.0}, r"slack=5.0: must be in \[0, 1\)"),
        ({"slack": math.nan}, r"slack=nan: must be in \[0, 1\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_settings(change, message):
    with pytest.raises(ValueError, match=message):
        Setting(**change)


NO_PLAN = {
    "encoder": (BertConfig(), "model_type='bert': an encoder; with is_decoder=true"),
    "encoder-decoder": (T5Config(), "model_type='t5': an encoder and a decoder"),
    "vision": (ViTConfig(), "model_type='vit': transformers has no causal language model"),
    "vision and text": (Gemma3Config(), "model_type='gemma3': a text model inside a larger one"),
    "state space": (MambaConfig(), "model_type='mamba': no stack of attention blocks"),
    "unlike blocks": (RecurrentGemmaConfig(), "model_type='recurrent_gemma': its blocks 0 and 2 differ"),
    "impossible": (LlamaConfig(num_hidden_layers=2, pad_token_id=-40000), "The configuration makes no llama model"),
}


@pytest.mark.parametrize(("config", "message"), NO_PLAN.values(), ids=NO_PLAN)
def test_models_without_a_plan(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Architecture.from_config(config)


def test_settings_that_do_not_suit_a_model():
    with pytest.raises(ValueError, match=r"rank=4096: must be at most 1024 .* dim=0"):  # grouped keys are narrow
        plan("Grass", Architecture.from_config(LlamaConfig(num_key_value_heads=8)), Setting(rank=4096, dim=0))
    with pytest.raises(ValueError, match="explore=4000: must be a fraction, or at most 3840 for this model, rank=256"):
        plan("Grass", LLAMA_7B, Setting(explore=4000))
    with pytest.raises(ValueError, match="seq_len=8192: beyond the sliding window of 4096"):
        plan("Grass", Architecture.from_config(MistralConfig(sliding_window=4096)), Setting(seq_len=8192))
    with pytest.raises(ValueError, match="seq_len=2048: must be at most 1024, the positions that this model learns"):
        plan("Grass", Architecture.from_config(KINDS["gpt2"]), Setting(rank=8))
    with pytest.raises(ValueError, match="chunk_tokens=256: this model does more to its logits"):
        plan("Grass", Architecture.from_config(KINDS[CAPPED]), Setting(rank=8))
    with pytest.raises(ValueError, match="Unknown method 'SGD'; available: AdamW"):
        plan("SGD", LLAMA_7B, Setting())


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_model(kind):
    """Parameters by building it; the matrices by converting it."""
    model = AutoModelForCausalLM.from_config(KINDS[kind])
    architecture = Architecture.from_config(KINDS[kind])
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    assert architecture.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    names = grass.compact(model, rank=8, explore=0)
    shapes = [model.get_submodule(name).shape for name in names if "experts." not in name]
    shapes += [model.get_parameter(name).shape[1:] for name in names if "experts." in name]
    assert sorted(shapes) == sorted((linear.m, linear.n) for linear in architecture.linears * architecture.layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-tied", "gemma2"])
def test_between_traced_sequences_and_batches(kind):
    """What is interpolated is what tracing would find."""
    tracer, direct = Tracer(KINDS[kind]), fake_model(KINDS[kind], torch.bfloat16)
    interpolated = tracer(3, 384, torch.bfloat16, linears=False)
    expected = trace(direct, 3, 384, linears=False, others=True)
    assert tuple(interpolated) == pytest.approx(tuple(expected), rel=0.1)  # another operation may be the largest
    assert tracer(1, 256, torch.bfloat16, linears=True).block > tracer(1, 256, torch.bfloat16, linears=False).block
