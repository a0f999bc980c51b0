import pytest
import torch

from grass.training.models import build_llama, llama_config


# Weights of an untied LLaMA: 2 V h + layers (4 h^2 + 3 h i + 2 h) + h; the totals are those the papers round.
@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("1m", 257, 869_760),
        ("9m", 32_000, 8_995_968),
        ("60m", 32_000, 58_073_600),
        ("130m", 32_000, 134_105_856),
        ("350m", 32_000, 367_969_280),
        ("1b", 32_000, 1_339_082_752),
        ("7b", 32_000, 6_738_415_616),
        ("13b", 32_000, 13_015_864_320),
    ],
)
def test_parameter_counts(name, vocab_size, parameters):
    with torch.device("meta"):
        model = build_llama(llama_config(name, vocab_size=vocab_size, max_seq_len=1024))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_weights_depend_on_the_seed_alone():
    config = llama_config("1m", vocab_size=257, max_seq_len=32)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two, other = (build_llama(config, seed=seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_bf16_weights_keep_rotary_frequencies_in_fp32():
    model = build_llama(llama_config("1m", vocab_size=257, max_seq_len=32), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'2m'.*available: 1m, 9m"):
        llama_config("2m", vocab_size=257, max_seq_len=32)
