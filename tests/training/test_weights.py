import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import grass
from grass.memory.llama import llama_config
from training.run import checkpoint
from training.run.models import build_llama
from training.run.weights import load_weights, read_weights, write_weights


def llama(seed=0, **options):
    return build_llama(llama_config("1m", vocab_size=257, max_seq_len=16), seed=seed, **options)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("shard_bytes", [300_000, 10**9])
def test_round_trip_in_files_of_bounded_size(tmp_path, shard_bytes):
    model, other = llama(0), llama(1)
    write_weights(model.state_dict(), tmp_path, shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 5) == (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 300_000)
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= shard_bytes
    load_weights(other, read_weights(tmp_path))
    assert_equal(other.state_dict(), model.state_dict())


def test_plain_transformers_loads_shards(tmp_path, monkeypatch):
    model = llama(dtype=torch.bfloat16)
    grass.compact(model, rank=8, explore=0, dim=1)
    monkeypatch.setattr(checkpoint, "write_weights", lambda weights, path: write_weights(weights, path, 300_000))
    checkpoint.export_model(model, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(loaded.state_dict(), model.state_dict())


def test_tied_weights_are_written_once(tmp_path):
    config = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=11,
        tie_word_embeddings=True,
    )  # fmt: skip
    model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    write_weights(model.state_dict(), tmp_path)
    assert "lm_head.weight" not in read_weights(tmp_path)
    load_weights(other, read_weights(tmp_path))
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_other_weights_are_refused(change):
    model = llama()
    weights = dict(model.state_dict())
    if change == "missing":
        del weights["lm_head.weight"]
    elif change == "unexpected":
        weights["other"] = torch.zeros(1)
    else:
        weights["lm_head.weight"] = torch.zeros(3, 128)
    with pytest.raises(
        RuntimeError, match={"missing": "Missing", "unexpected": "Unexpected", "shape": "size mismatch"}[change]
    ):
        load_weights(model, {name: t.clone() for name, t in weights.items()})
