"""Rates: measured, stored with the machine's name, refused on another machine."""

from __future__ import annotations

import json

import pytest
import torch

from grass.cpu import kernel
from grass.machine import link, rates
from grass.machine.link import Link
from grass.machine.rates import Machine, machine_name
from grass.offload.tasks import Task

MACHINE = Machine(host_rate=2.0, down_rate=4.0, up_rate=5.0, device_rate=8.0)


@pytest.fixture
def brief(monkeypatch):
    """Measurements of small tensors, for a moment."""
    for name, value in {"SECONDS": 0.01, "HOST_ROWS": 8, "LEAST_BYTES": 1 << 14, "MOST_BYTES": 1 << 16}.items():
        monkeypatch.setattr(rates, name, value)


def test_seconds():
    found = {resource: MACHINE.seconds(Task("t", resource, 40)) for resource in ("host", "down", "up", "device")}
    assert found == {"host": 20, "down": 10, "up": 8, "device": 5}
    with pytest.raises(ValueError, match="Invalid resource='disk'"):
        MACHINE.seconds(Task("t", "disk", 1))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["host_rate", "down_rate", "up_rate", "device_rate"])
def test_rates_are_positive(name, rate):
    with pytest.raises(ValueError, match=f"Invalid {name}={rate}"):
        Machine(**{**dict.fromkeys(("host_rate", "down_rate", "up_rate", "device_rate"), 1.0), name: rate})


@pytest.mark.parametrize("compiled", [True, False])
def test_measure(brief, monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(kernel, "at_hand", lambda: False)
    elif not kernel.at_hand():
        pytest.skip("no C++ compiler")
    used = []
    monkeypatch.setattr(
        rates, "host_rate", lambda measured=rates.host_rate: used.append(torch.get_num_threads()) or measured()
    )
    before = torch.get_num_threads()
    found = Machine.measure("cpu", threads=2)
    assert min(found.host_rate, found.down_rate, found.up_rate, found.device_rate) > 0
    assert used == [2]
    assert torch.get_num_threads() == before
    assert found.memory > 1 << 30  # torch alone takes a good part of it
    assert found.name == machine_name("cpu", 2)
    assert ", 2 threads, cpu" in found.name


def test_memory_is_not_negative():
    with pytest.raises(ValueError, match=r"Invalid memory=-1\. Must be >= 0"):
        Machine(1.0, 1.0, 1.0, 1.0, memory=-1)


def test_measured_link_is_the_one_given(brief, monkeypatch):
    monkeypatch.setattr(link, "MOST_CREDIT", 0.0)  # then no single copy is faster than the rate
    slow = Link("cpu", 50e6)
    found = Machine.measure("cpu", link=slow)
    assert max(found.down_rate, found.up_rate) <= 1.001 * 50e6
    assert min(slow.bytes_down, slow.bytes_up) > 0


def test_link_of_another_device():
    with pytest.raises(ValueError, match="The link is to cpu, the device is meta"):
        Machine.measure("meta", link=Link("cpu"))


def test_save_and_load(tmp_path):
    path = tmp_path / "machine.json"
    made = Machine(1.5, 2.5, 3.5, float("inf"), machine_name("cpu", 3))
    made.save(path)
    assert Machine.load(path, "cpu", threads=3) == made
    with pytest.raises(ValueError, match=r"rates of '.*, 3 threads, cpu', this is '.*, 4 threads, cpu'; measure again"):
        Machine.load(path, "cpu", threads=4)
    other = json.loads(path.read_text()) | {"name": "another processor, 3 threads, cpu"}
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="rates of 'another processor, 3 threads, cpu'"):
        Machine.load(path, "cpu", threads=3)
    for wrong in ("[]", '{"host_rate": 1}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="does not hold the rates"):
            Machine.load(path, "cpu")


def test_name_without_proc(monkeypatch):
    monkeypatch.setattr(rates.Path, "exists", lambda path: False)
    assert machine_name("cpu", 1).partition(",")[0] != ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda():
    found = Machine.measure("cuda")
    assert torch.cuda.get_device_name() in found.name
    assert found.device_rate > found.host_rate
