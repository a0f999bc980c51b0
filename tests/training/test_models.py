import pytest
import torch

from grass.memory.llama import llama_config
from training.run.models import build_llama


# Weights of an untied LLaMA: 2 V h + layers (4 h^2 + 3 h i + 2 h) + h; the totals are those the papers round.
@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("1m", 257, 869_760),
        ("9m", 32_000, 8_995_968),
        ("9m-wide", 257, 8_842_560),
        ("60m", 32_000, 58_073_600),
        ("130m", 32_000, 134_105_856),
        ("350m", 32_000, 367_969_280),
        ("1b", 32_000, 1_339_082_752),
        ("7b", 32_000, 6_738_415_616),
        ("13b", 32_000, 13_015_864_320),
    ],
)
def test_parameter_counts(name, vocab_size, parameters):
    model = build_llama(llama_config(name, vocab_size=vocab_size, max_seq_len=1024), device="meta")
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


def test_checkpointing_and_chunks_leave_loss_and_gradients():
    config, ids = llama_config("1m", vocab_size=257, max_seq_len=32), torch.randint(257, (2, 9))
    results = []
    for options in ({}, {"checkpointing": True, "chunk_tokens": 5}):
        model = build_llama(config, **options)
        with torch.no_grad():
            model(input_ids=ids, labels=ids)  # the first forward compares losses
        calls = []
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        results.append((len(calls), output.logits is None, output.loss, [p.grad for p in model.parameters()]))
    (calls, chunked, loss, grads), (calls_again, chunked_again, loss_again, grads_again) = results
    assert (calls, calls_again) == (1, 2), "forward runs again in backward"
    assert (chunked, chunked_again) == (False, True)
    torch.testing.assert_close(loss_again, loss)
    torch.testing.assert_close(grads_again, grads)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'2m'.*available: 1m, 9m"):
        llama_config("2m", vocab_size=257, max_seq_len=32)
