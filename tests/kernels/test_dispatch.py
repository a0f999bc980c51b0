"""Which implementation runs, and what compilers see of the operations."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from grass import kernels
from grass.kernels import dispatch
from grass.kernels.language import INTERPRETED

from .conftest import DEVICE


@pytest.fixture
def log(caplog):
    dispatch._say_once.cache_clear()
    caplog.set_level(logging.WARNING, "grass")
    return caplog


def test_chooses_by_device_unless_overridden(monkeypatch) -> None:
    x = torch.zeros(2, 2, device=DEVICE)
    monkeypatch.delenv("GRASS_KERNELS", raising=False)
    assert dispatch.runs_triton("op", x) == (DEVICE == "cuda")
    assert not dispatch.runs_triton("op", torch.zeros(2, 2))
    monkeypatch.setenv("GRASS_KERNELS", "triton")
    assert dispatch.runs_triton("op", x)
    monkeypatch.setenv("GRASS_KERNELS", "torch")
    assert not dispatch.runs_triton("op", x)


def test_unknown_choice(monkeypatch) -> None:
    monkeypatch.setenv("GRASS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="GRASS_KERNELS='cuda': must be 'torch' or 'triton'"):
        kernels.row_norms(torch.zeros(2, 2))


def test_falls_back_and_says_so_once(monkeypatch, log) -> None:
    monkeypatch.setenv("GRASS_KERNELS", "triton")
    x = torch.randn(5, 7, dtype=torch.float64, device=DEVICE)
    for _ in range(3):
        torch.testing.assert_close(kernels.row_norms(x), x.norm(dim=1))
    assert log.messages == [
        "grass::row_norms runs in torch: no kernel for torch.float64 tensors of layout torch.strided"
    ]
    kernels.scatter_add_rows(x, torch.tensor([1], device=DEVICE), x[:1])
    assert len(log.messages) == 2


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_triton_on_a_device_without_kernels(monkeypatch, log) -> None:
    monkeypatch.setenv("GRASS_KERNELS", "triton")
    assert not dispatch.runs_triton("op", torch.zeros(2, device="meta"))
    assert "no kernel for meta tensors in the interpreter" in log.text


def test_launches_on_the_gpu_of_its_tensors(monkeypatch) -> None:
    """Triton would take the current one."""
    entered: list[Any] = []

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", on)
    with dispatch.on_device_of(SimpleNamespace(is_cuda=True, device="cuda:1")):  # type: ignore[arg-type]
        assert entered == ["cuda:1"]
    with dispatch.on_device_of(torch.ones(1)):
        assert entered == ["cuda:1"]


@pytest.mark.slow
def test_imports_and_runs_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, grass, grass.kernels as kernels\n"
        f"torch.set_default_device({DEVICE!r})\n"
        "assert kernels.row_norms(torch.ones(2, 4)).tolist() == [2.0, 2.0]\n"
        "assert kernels.row_norms(torch.eye(3), 1).tolist() == [1.0, 1.0, 1.0]\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "GRASS"))} | {"GRASS_KERNELS": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    environment["GRASS_KERNELS"] = "triton"
    said = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    assert "triton is not installed" in said.stderr


def calls():
    """Every operation on small operands."""
    f, i = torch.randn(6, 8, device=DEVICE), torch.tensor([4, 1], device=DEVICE)
    rows, ages = torch.randn(2, 8, device=DEVICE), torch.ones(2, device=DEVICE)
    two, numbers = [f, f.clone()], (0, 0.0, 0.1, 0.9, 0.99, 1e-8, 0.9, False, True)
    each = {name: [t, t.clone()] for name, t in {"i": i, "rows": rows, "ages": ages, "v": rows.abs(), "g": f}.items()}
    adam = (two, each["i"], [], each["g"], each["rows"], each["v"], each["ages"], *numbers, [7, 8], [])
    codes = torch.randint(0, 255, (2, 2, 8), device=DEVICE, dtype=torch.uint8)
    coded = [codes[0]], [torch.ones(1, device=DEVICE)], [codes[1]], [torch.ones(1, device=DEVICE)]
    factors, length, norms = f[0].clone(), ages[0].clone(), ages.clone()
    return {
        "scatter_add_rows": (f, i, rows, ages, -1.0),
        "row_norms": (f,),
        "compact_adamw_": adam,
        "compact_adamw_8bit_": ([f], [i], [], [f.clone()], *coded, [ages], *numbers, [7], [5]),
        "move_factors": (each["rows"], each["v"], [], [], two, each["i"], each["ages"], 0, 0.0, 0.9, 0.99, 1e-8),
        "move_rows_": ([f], [i], [rows], [rows.clone()], [factors], [length], [norms], 0, 0.1, 0.9, False, [7]),
        "reload_rows_": (each["rows"], two, each["i"], 0),
        "row_sketch": (f, f.clone(), rows.t()),
        "shrink_": ([f.bfloat16(), f.bfloat16()], 0.9, [7, 8]),
    }


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("name", list(calls()))
def test_registration(name, implementation, monkeypatch) -> None:
    monkeypatch.setenv("GRASS_KERNELS", implementation)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(torch.ops.grass, name).default, calls()[name], test_utils=utils)


def test_fake_tensors_see_shapes() -> None:
    with FakeTensorMode():
        x = torch.empty(70_000, 9, dtype=torch.bfloat16)
        assert kernels.row_norms(x, 1).shape == (9,)
        assert kernels.row_norms(x).dtype == torch.float32
        assert kernels.row_sketch(x, x, torch.empty(9, 16)).shape == (9, 16)


def test_compiles_into_one_graph() -> None:
    def step(weight, grad, indices, m, v):
        kernels.compact_adamw_([weight], [indices], [grad], [m], [v], 3, gather_grad=True, step_size=0.1)
        return kernels.row_sketch(grad, weight, weight.t() @ grad).sum() + kernels.row_norms(weight).sum()

    def arguments():
        torch.manual_seed(0)
        moments = torch.zeros(2, 5, device=DEVICE), torch.zeros(2, 5, device=DEVICE)
        return (
            torch.randn(4, 5, device=DEVICE),
            torch.randn(4, 5, device=DEVICE),
            torch.tensor([3, 1], device=DEVICE),
            *moments,
        )

    plain, compiled = arguments(), arguments()
    expected = step(*plain)
    ours = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    torch.testing.assert_close(ours, expected)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b)
