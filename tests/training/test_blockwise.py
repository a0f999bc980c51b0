"""Models made layer by layer are those that transformers makes whole."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

import grass
from grass.compact_mode.layer import CompactLayer
from grass.memory.llama import llama_config
from training.run.models import build_llama


def nothing(layer, number):
    pass


def to_int8(layer, number):
    grass.compact(layer, rank=16, explore=0, weights="int8", seed=number)


def test_layers_are_as_transformers_makes_them():
    config = llama_config("9m", vocab_size=2000, max_seq_len=32)
    whole = build_llama(config, dtype=torch.bfloat16)
    made = build_llama(config, dtype=torch.bfloat16, convert=nothing)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for (name, p), q in zip(made.named_parameters(), whole.parameters(), strict=True):
        assert (p.shape, p.dtype, p.device, p.requires_grad) == (q.shape, q.dtype, q.device, True), name
        torch.testing.assert_close(p.float().std(), q.float().std(), rtol=0.05, atol=0, msg=name)
        torch.testing.assert_close(p.float().mean(), q.float().mean(), rtol=0, atol=1e-3, msg=name)
    assert {name: b.tolist() for name, b in made.named_buffers()} == {
        name: b.tolist() for name, b in whole.named_buffers()
    }
    assert len({p.float().sum().item() for p in made.parameters() if p.ndim == 2}) == sum(
        p.ndim == 2 for p in made.parameters()
    ), "every matrix has its own numbers"


def test_the_same_seed_gives_the_same_weights_and_rows():
    config = llama_config("1m", vocab_size=257, max_seq_len=32)
    one, two, other = (build_llama(config, seed=seed, convert=to_int8) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    first, second = (one.model.layers[i].mlp.up_proj.selected for i in (0, 1))
    assert not torch.equal(first, second), "layers draw rows of their own"


def test_converted_layers_train():
    config, ids = llama_config("1m", vocab_size=257, max_seq_len=32), torch.randint(257, (2, 16))
    model = build_llama(config, dtype=torch.bfloat16, convert=to_int8, checkpointing=True, chunk_tokens=10)
    assert sum(isinstance(module, CompactLayer) for module in model.modules()) == 4 * 7
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    grass.compact(
        model, rank=16, explore=0, weights="int8"
    )  # as building an optimizer does: nothing is left to convert
    optimizer = grass.GrassAdamW(model, lr=3e-3, update_interval=4)
    losses = []
    for _ in range(10):
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_tied_weights_stay_tied():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=11,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = build_llama(config, convert=nothing)
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("layers", [6, 12])
def test_never_more_than_one_unconverted_layer(layers):
    """By torch's tracker on fake tensors, 13b's width."""
    config = llama_config("13b", vocab_size=100, max_seq_len=32)
    config.num_hidden_layers = layers
    with FakeTensorMode():
        tracker = MemTracker()
        with tracker:
            model = build_llama(config, dtype=torch.bfloat16, convert=to_int8)
        peak, held = (tracker.get_tracker_snapshot(kind)[torch.device("cpu")] for kind in ("peak", "current"))
    one_layer = 2 * sum(m.weight.numel() for m in model.model.layers[0].modules() if isinstance(m, CompactLayer))
    quantising = 4 * 2 * 5120 * 13824
    assert peak["Total"] - held["Total"] < one_layer + quantising
