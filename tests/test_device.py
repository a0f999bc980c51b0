"""Code for any accelerator: which one it is, is asked in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grass
from grass import device
from grass.machine.link import Link

ROOT = Path(__file__).parents[1] / "grass"
ACCELERATORS = {"cuda", "xpu", "mps", "hip", "npu", "hpu"}
CPU, CARD, OTHER = torch.device("cpu"), torch.device("cuda:1"), torch.device("mps")


def of_one_accelerator(source: str) -> Iterator[str]:
    """The places that ask for one accelerator: ``torch.cuda``, a comparison with ``"cuda"``, ``tensor.is_cuda``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_module = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ACCELERATORS
            if is_module or node.attr in {"is_cuda", "is_xpu", "is_mps", "cuda"}:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare):
            constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
            if not constants.isdisjoint(ACCELERATORS):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(name.startswith(f"torch.{kind}") for name in names for kind in ACCELERATORS):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_one_module_asks_which_accelerator_it_is() -> None:
    found = {str(path.relative_to(ROOT)): [*of_one_accelerator(path.read_text())] for path in ROOT.rglob("*.py")}
    assert {name: places for name, places in found.items() if places and name != "device.py"} == {}


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.synchronize()", "if t.device.type == 'cuda': pass", "t.is_cuda", "t.cuda()", "import torch.cuda.nvtx"],
)
def test_it_is_found_where_it_is(line: str) -> None:
    assert len([*of_one_accelerator(line)]) >= 1


def test_what_torch_does_not_say_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (CPU, OTHER, torch.device("meta")):
        assert device.pci_address(where) is None
        assert device.capability(where) == (0, 0)
    assert device.name_of(CPU) == "cpu"
    monkeypatch.setattr(torch.xpu, "get_device_capability", lambda where: {"has_fp64": True})
    assert device.capability(torch.device("xpu:0")) == (0, 0)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda where: SimpleNamespace(name="a card"))
    assert device.pci_address(torch.device("xpu:0")) is None


def test_what_torch_says_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: f"card {where.index}")
    assert device.pci_address(CARD) == "0000:4b:01.0"
    assert device.capability(CARD) == (9, 0)
    assert device.name_of(CARD) == "card 1"


@pytest.mark.parametrize(
    ("name", "variable", "value", "expected"),
    [
        ("cuda:1", "CUDA_VISIBLE_DEVICES", "4,6", "6"),
        ("cuda", "CUDA_VISIBLE_DEVICES", "GPU-8a, 6", "GPU-8a"),
        ("cuda:1", "HIP_VISIBLE_DEVICES", "2,3", "3"),
        ("xpu:0", "ZE_AFFINITY_MASK", "1", "1"),
        ("cuda:1", "ZE_AFFINITY_MASK", "7,8", "1"),
        ("mps", "CUDA_VISIBLE_DEVICES", "5", "0"),
    ],
)
def test_numbers_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str, value: str, expected: str
) -> None:
    for others in device.VISIBLE.values():
        for other in others:
            monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, value)
    assert device.number_on_machine(torch.device(name)) == expected


def test_devices_without_streams_are_refused_for_offload_and_streaming() -> None:
    """MPS cannot pin memory, and has one stream: an error by name, not a slow or wrong copy."""
    assert not device.has_streams(OTHER)
    with pytest.raises(ValueError, match=r"Invalid device='mps'. Must be a CPU or an accelerator with streams"):
        Link(OTHER)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(ValueError, match="Invalid device='mps'"):
        grass.stream(torch.nn.Sequential(model), "mps")
    assert all(p.device.type == "cpu" and p.data_ptr() for p in model.parameters())
