import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grass.memory.llama import llama_config
from training.run.models import build_llama
from training.run.throughput import PEAK_FLOPS, model_flops_per_token, peak_flops, peak_memory


def test_model_flops_against_torchs_counter():
    model = build_llama(llama_config("9m", vocab_size=500, max_seq_len=64))
    model.set_attn_implementation("eager")  # plain products, which the counter knows on a CPU
    ids = torch.randint(500, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert model_flops_per_token(model, 64) * 64 == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", PEAK_FLOPS["A100"]),
        ("NVIDIA GeForce RTX 4090", PEAK_FLOPS["RTX 4090"]),
        ("NVIDIA L40S", PEAK_FLOPS["L40S"]),
        ("NVIDIA L4", PEAK_FLOPS["L4"]),
        ("NVIDIA H200", PEAK_FLOPS["H200"]),
        ("Some Other Device", None),
    ],
)
def test_peak_flops_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_resident_memory_is_in_bytes():
    assert 50e6 < peak_memory(torch.device("cpu")) < 500e9
