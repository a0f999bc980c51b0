"""Threads and NUMA nodes of the host's updates, on machines made of files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grass import Offload
from grass.machine import numa
from grass.machine.numa import bound_cpus, check_node, host_threads, node_of, nodes, physical_cores
from tests.offload.training import build, same, train

CPU, CARD = torch.device("cpu"), torch.device("cuda:0")
ALL = frozenset(range(16))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four cores, each of two processors; one device on node 1."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
    write(tmp_path / "devices/system/node/node2/cpulist", "")  # memory only
    for cpu in range(16):
        siblings = f"{cpu % 8},{cpu % 8 + 8}"
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    on_card(tmp_path, "1")
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(numa, "_allowed", lambda: ALL)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def on_card(root: Path, node: str) -> None:
    write(root / "bus/pci/devices/0000:4b:00.0/numa_node", node)


def test_nodes_and_cores(root: Path) -> None:
    assert nodes(root) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert [physical_cores(cpus, root) for cpus in (range(16), [0, 8], [0, 1], [])] == [8, 1, 2, 0]


def test_threads_are_the_cores_of_the_node_of_the_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_of(CARD, root) == 1
    assert host_threads(CARD, root=root) == 4
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({4, 5, 12, 0, 1, 2}))
    assert host_threads(CARD, root=root) == 2
    assert host_threads(CARD, 0, root=root) == 3
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({0, 1, 2}))  # none on the node of the device
    assert host_threads(CARD, root=root) == 3


@pytest.mark.parametrize("node", ["-1", "7"])
def test_a_device_without_a_node_has_all(root: Path, node: str) -> None:
    on_card(root, node)
    assert node_of(CARD, root) is None
    assert host_threads(CARD, root=root) == 8
    assert bound_cpus(CARD, "auto", root) == frozenset()


def test_a_device_that_the_system_does_not_know(root: Path) -> None:
    (root / "bus/pci/devices/0000:4b:00.0/numa_node").unlink()
    assert host_threads(CARD, root=root) == 8


def test_processes_of_a_machine_share_its_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for processes in ("2", "4", "100"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        found.append(host_threads(CARD, root=root))
    assert found == [4, 2, 1]


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_control_group_has_time_for_fewer(root: Path, limit: str, expected: int) -> None:
    write(root / "fs/cgroup/cpu.max", limit)
    assert host_threads(CARD, root=root) == expected


def test_a_cpu_as_the_device_has_the_threads_of_torch(root: Path) -> None:
    assert host_threads(CPU, root=root) == torch.get_num_threads()
    assert node_of(CPU, root) is None
    assert bound_cpus(CPU, "auto", root) == frozenset()


def test_elsewhere_than_on_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host_threads(CARD, root=tmp_path) == torch.get_num_threads()
    assert bound_cpus(CPU, 0, tmp_path) == frozenset()
    check_node(3, tmp_path)


def test_bound_processors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound_cpus(CARD, None, root) == frozenset()
    assert bound_cpus(CARD, "auto", root) == nodes(root)[1]
    assert bound_cpus(CPU, 0, root) == nodes(root)[0]
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({0, 1, 4}))
    assert bound_cpus(CARD, "auto", root) == {4}


def test_one_node_is_not_bound_by_itself(root: Path) -> None:
    (root / "devices/system/node/node0/cpulist").unlink()
    assert bound_cpus(CARD, "auto", root) == frozenset()
    assert bound_cpus(CARD, 1, root) == nodes(root)[1]


def test_a_node_that_is_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_node(1, root)
    with pytest.raises(ValueError, match="Invalid numa=2: the nodes that this process may use are 0, 1"):
        check_node(2, root)
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({0}))
    with pytest.raises(ValueError, match="Invalid numa=1: the nodes that this process may use are 0"):
        check_node(1, root)


@pytest.mark.skipif(not nodes(), reason="the system does not name its nodes")
def test_the_option_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="Invalid numa=4096: the nodes that this process may use are "):
        Offload(numa=4096)


@pytest.mark.parametrize("numa", [True, 1.0, -1, "1", "none"])
def test_other_values_are_refused(numa: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Invalid numa=.*: must be an integer >= 0, 'auto' or None"):
        Offload(numa=numa)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or not nodes(), reason="nothing can be bound")
def test_only_the_thread_of_the_host_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on it."""
    node, cpus = next(iter(nodes().items()))
    one = frozenset([min(cpus & os.sched_getaffinity(0))])
    monkeypatch.setattr(numa, "bound_cpus", lambda device, numa: one if numa == node else frozenset())
    before, used = os.sched_getaffinity(0), []

    def noted(threads_: int | None) -> None:
        used.append((threading.current_thread().name, os.sched_getaffinity(0), threads_))

    monkeypatch.setattr(numa, "use_threads", noted)
    resident, offloaded = build("compact"), build("compact", offload=Offload(numa=node))
    assert train(*resident, 5) == train(*offloaded, 5)
    assert offloaded[1].offload is not None
    offloaded[1].offload.finish()
    assert same(resident[0].state_dict(), offloaded[0].state_dict())
    assert used == [("grass-host", one, None)]
    assert os.sched_getaffinity(0) == before


def test_threads_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []
    monkeypatch.setattr(numa, "use_threads", used.append)
    model, optimizer = build("full", offload=Offload(threads=1, overlap=False))
    train(model, optimizer, 2)
    assert used == [1]
