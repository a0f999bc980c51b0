"""Optimizer state in shards: the same bits, the same layouts, files of bounded size."""

import pytest
import torch

import grass
from grass.memory.llama import llama_config
from training.run.models import build_llama
from training.run.states import read_state, write_state


@pytest.fixture(scope="module")
def state():
    """Of a compact model whose moments are column-major, narrow and partly in host memory."""
    model = build_llama(llama_config("1m", vocab_size=257, max_seq_len=16), dtype=torch.bfloat16)
    grass.compact(model, rank=16, explore=0, dtype=torch.float32)
    optimizer = grass.GrassAdamW(model, state_policy="bank", moment_dtype="8bit")
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    return {"step": 1, "optimizer": optimizer.state_dict()}


def assert_same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    else:
        assert ours == theirs


@pytest.mark.parametrize("shard_bytes", [1, 200_000, 10**9])
def test_shards(state, tmp_path, shard_bytes):
    write_state(state, tmp_path, shard_bytes)
    assert_same(read_state(tmp_path), state)
    sizes = [file.stat().st_size for file in tmp_path.glob("optimizer-*.pt")]
    states = state["optimizer"]["state"]
    assert len(sizes) == (len(states) if shard_bytes == 1 else 1 if shard_bytes == 10**9 else len(sizes))
    if shard_bytes == 200_000:
        largest = max(sum(v.nbytes for v in s.values() if isinstance(v, torch.Tensor)) for s in states.values())
        assert 2 < len(sizes) < len(states)
        assert max(sizes) <= max(shard_bytes, largest) + 20_000  # what torch.save adds
    assert (tmp_path / "state.pt").stat().st_size < 50_000


def test_states_without_an_optimizer(tmp_path):
    write_state({"step": 3}, tmp_path)
    assert read_state(tmp_path) == {"step": 3}
