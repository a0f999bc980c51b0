"""The one-pass CPU kernel against its torch twin."""

import copy
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import grass
from grass import PAPER
from grass.compact_mode import refresh_cycle
from grass.cpu import kernel as cpu_kernel
from grass.cpu.draw import Draws
from grass.selection.exploration import draw_explored, draw_key
from grass.selection.projector import Projector
from tests.stepping.row_step import compact_adamw

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8}
# float32: both round each operation once, in another order; the compiler may fuse multiply and add
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


def column_major(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


@needs_compiler
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("per_row", [False, True], ids=["one-age", "row-ages"])
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, column_major], ids=["row-major", "column-major"])
@pytest.mark.parametrize("mode", ["dense", "active", "active, no weight", "active, weight across"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_step(dim, mode, layout, per_row, maximize) -> None:
    """Weights of several shapes in one call, in two threads."""
    ours, theirs, batch, kept = [], [], cpu_kernel.Batch(True), []
    torch.set_num_threads(2)
    for shape in [(1, 1), (7, 13), (64, 48), (37, 131)]:
        rank = max(1, shape[dim] // 3)
        projector = Projector(torch.randperm(shape[dim])[:rank].sort().values, None, dim)
        ages = torch.randint(1, 50, (rank,)).float() if per_row else 7
        weight, grad = layout(torch.randn(shape)), layout(torch.randn(shape))
        moments = [layout(projector.gather(make(shape))) for make in (torch.randn, torch.rand)]
        if mode == "active, weight across":
            weight = weight.contiguous() if layout is column_major else column_major(weight)
        twins = [t.clone() for t in (weight, *moments)]
        hyper = {**HYPER, "lr": 1e-2, "weight_decay": 0.1, "maximize": maximize}
        compact_adamw(twins[0], projector, projector.gather(grad), *twins[1:], ages, **hyper)
        values = None
        if mode != "dense":
            values, grad = layout(projector.gather(weight)), layout(projector.gather(grad))
            twins.append(projector.gather(twins[0]))
        given = None if mode == "active, no weight" else weight
        numbers = (ages, 1e-2, 1 - 1e-2 * 0.1)
        assert batch.add(cpu_kernel.Weight(given, projector.indices, dim, grad, values, *moments, *numbers))
        kept += [projector, ages, grad]
        ours += [t for t in (given, *moments, values) if t is not None]
        theirs += twins if given is not None else twins[1:]
    batch.run(**HYPER, maximize=maximize)
    torch.set_num_threads(1)
    for our, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, twin, **CLOSE)


@needs_compiler
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("decay", ["selected", "all"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("explore", [0, 0.3], ids=["", "exploring"])
@pytest.mark.parametrize("mode", ["dense", "compact", "int8"])
def test_training_agrees_with_torch_operators(mode: str, explore: float, dim: int, decay: str, policy: str) -> None:
    def train(fused: bool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 7))
        params, rank = model, {"rank": 0.4, "dim": dim, "explore": explore}
        if mode == "dense":
            params = grass.param_groups(model, targets="all-linear", **rank)
        else:
            grass.compact(model, **rank, weights=None if mode == "compact" else "int8")
        options = {"update_interval": 3, "selection": "uniform", "state_policy": policy, "decay": decay}
        optimizer = grass.GrassAdamW(
            params, lr=1e-2, weight_decay=0.1, fused=fused, **PAPER | options | {"explore": None}
        )
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(5, 13)).square().sum().backward()
            optimizer.step()
            for layer in (model[0], model[2]):
                assert mode == "dense" or layer.holds_active()
        return [p.detach() for p in model.parameters() if p.is_floating_point()]

    for ours, theirs in zip(train(None), train(False), strict=True):
        if mode == "int8":  # twelve steps of rounding differences, now and then one of a code
            assert (ours - theirs).norm() < 1e-2 * theirs.norm()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(8, 8)[::2, ::2], torch.empty(4, 4, device="meta")],
    ids=["bf16", "strided", "meta"],
)
def test_declines_what_it_does_not_know(weight: torch.Tensor) -> None:
    batch = cpu_kernel.Batch(True)
    moments = torch.zeros(2, 4), torch.zeros(2, 4)
    for matrix, grad in ((weight, torch.randn(4, 4)), (torch.randn(4, 4), torch.randn(4, 4).t())):
        numbers = (1, 1e-3, 1.0)
        assert not batch.add(cpu_kernel.Weight(matrix, torch.tensor([0, 2]), 0, grad, None, *moments, *numbers))
    batch.run(**HYPER, maximize=False)


@needs_compiler
def test_the_stride_of_a_single_column_does_not_matter() -> None:
    """Autograd may give the sum of several gradients another one."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5, bias=False)
    grass.compact(layer, rank=1, explore=0)
    values = torch.randn(5)
    stepped = []
    for stride in (1, 5):
        grad = values.as_strided((5, 1), (1, stride))
        assert cpu_kernel._direction([torch.empty(5, 6), grad]) == 0
        twin = copy.deepcopy(layer)
        optimizer = grass.GrassAdamW(twin, lr=1e-2)
        for _ in range(5):
            twin.active.grad = grad
            optimizer.step()
        stepped.append(twin.weight)
    assert torch.equal(*stepped)


LAYOUTS = [Tensor.contiguous, column_major, lambda t: torch.stack([t, t], 2)[..., 0]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def drawn_layers(draw: st.DrawFn) -> tuple:
    """Size, width, selected, explored, dim, layouts of weight and active rows, dtype."""
    size, width = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    explored = draw(st.integers(1, size))
    rank = draw(st.integers(0, size - explored) | st.just(size - explored))
    layouts = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    return size, width, rank, explored, draw(st.integers(0, 1)), layouts, draw(st.sampled_from(DTYPES))


SHARED = [(900, 400, 100, 200, 1, layouts, torch.float32) for layouts in [(1, 1), (0, 0), (1, 0), (0, 1)]]


@needs_compiler
@example(layers=SHARED, threads=2, seed=-3)  # large enough that threads share them
@given(layers=st.lists(drawn_layers(), max_size=4), threads=st.integers(1, 3), seed=st.integers(-5, 2**40))
def test_draws_and_gathers_as_torch_does(layers: list[tuple], threads: int, seed: int) -> None:
    """Equal to the bit; nothing else changes."""
    batch, ours, theirs = Draws(True), [], []
    for position, (size, width, rank, explored, dim, (layout, own_layout), dtype) in enumerate(layers):
        shapes = [(n, width) if dim == 0 else (width, n) for n in (size, rank + explored)]
        weight, active = (
            LAYOUTS[layout](torch.randn(shapes[0]).to(dtype)),
            LAYOUTS[own_layout](torch.ones(shapes[1]).to(dtype)),
        )
        chosen = torch.randperm(size)[: rank + explored]
        expected, twin = chosen.clone(), active.clone()
        key = seed, position, 7
        expected[rank:] = draw_explored(chosen[:rank], size, explored, *key)
        twin.narrow(dim, rank, explored).copy_(weight.index_select(dim, expected[rank:]))
        before = [t._version for t in (active, chosen)]
        assert batch.add(weight, dim, active, dim, chosen, rank, draw_key(*key))
        ours.append((active, chosen, weight, before))
        theirs.append((twin, expected, weight.clone()))
    cpu_kernel.use_threads(threads)
    batch.run()
    cpu_kernel.use_threads(None)
    for (*our, before), twins in zip(ours, theirs, strict=True):
        for tensor, twin in zip(our, twins, strict=True):
            assert torch.equal(tensor, twin)
        assert all(t._version > version for t, version in zip(our, before, strict=False))  # graphs that saved them


class Other(Tensor):
    """A tensor that is not plain."""


@pytest.mark.parametrize(
    ("weight", "active", "fused"),
    [
        (torch.zeros(8, 4, dtype=torch.int8), torch.zeros(6, 4), None),
        (torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(6, 4), None),
        (torch.zeros(8, 4, dtype=torch.int8), torch.zeros(6, 4, dtype=torch.int8), None),
        (torch.zeros(8, 4, device="meta"), torch.zeros(6, 4, device="meta"), None),
        (torch.zeros(8, 4).as_subclass(Other), torch.zeros(6, 4), None),
        (torch.zeros(8, 4), torch.zeros(6, 4), False),
    ],
    ids=["int8", "mixed", "one byte", "meta", "subclass", "fused=False"],
)
def test_leaves_other_layers_to_torch(weight: Tensor, active: Tensor, fused: bool | None) -> None:
    batch, chosen = Draws(fused), torch.arange(6)
    assert not batch.add(weight, 0, active, 0, chosen, 2, draw_key(0, 0, 0))
    batch.run()
    assert torch.equal(chosen, torch.arange(6))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_compact_mode_draws_by_the_kernel(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators explore the same rows, and are not called where the kernel is wanted."""
    explored = []
    for fused in (False, None):
        layer = torch.nn.Linear(13, 31, dtype=dtype)
        grass.compact(layer, rank=4, explore=3, dim=dim, targets="all-linear")
        optimizer = grass.GrassAdamW(layer, fused=fused, update_interval=3, selection="uniform")
        if fused is None:
            monkeypatch.delattr(refresh_cycle, "draw_explored_of_each")
        for _ in range(7):
            layer(torch.randn(5, 13, dtype=dtype)).square().sum().backward()
            optimizer.step()
            explored.append(layer.chosen.tolist())
            assert layer.holds_active()
    assert explored[:7] == explored[7:]
    assert len(set(map(tuple, explored))) > 4  # of 7: a draw may repeat


def one_step(fused: bool | None) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones_like(p)
    grass.GrassAdamW([p], rank=2, lr=0.1, fused=fused, **PAPER).step()
    return p.detach()


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """No kernel built or looked for yet, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (cpu_kernel.library, cpu_kernel.at_hand):
        function.cache_clear()
    yield tmp_path
    for function in (cpu_kernel.library, cpu_kernel.at_hand):
        function.cache_clear()


@pytest.mark.parametrize("obstacle", ["no compiler", "compiler fails", "no cache"])
def test_without_the_kernel(unbuilt, monkeypatch, caplog, obstacle) -> None:
    """By default torch's operators step, and the log says so once; ``fused=True`` raises."""
    if obstacle == "no compiler":
        monkeypatch.setattr(cpu_kernel.shutil, "which", lambda name: None)
    elif obstacle == "compiler fails":
        monkeypatch.setattr(cpu_kernel, "FLAGS", ("-no-such-flag",))
    else:
        (unbuilt / "grass").write_text("a file where a directory is wanted")
    reason = {"no compiler": "C\\+\\+ compiler", "compiler fails": "no-such-flag", "no cache": "exists"}[obstacle]
    with caplog.at_level(logging.WARNING, logger="grass"):
        first, second = one_step(None), one_step(None)
    assert torch.equal(first, second)
    assert (first != 1).sum() == 8
    assert len(caplog.records) == 1
    assert "torch's operators" in caplog.text
    with pytest.raises((RuntimeError, OSError), match=reason):
        one_step(True)
    assert not list(unbuilt.rglob("*.so"))


@needs_compiler
def test_never_compiles_unless_wanted(unbuilt) -> None:
    one_step(False)
    assert not list(unbuilt.rglob("*"))
    one_step(None)
    assert len(list(unbuilt.rglob("*.so"))) == 1


@needs_compiler
@pytest.mark.soak
def test_processes_that_start_at_once_share_the_cache(tmp_path) -> None:
    """As ranks do: each finds either no kernel or a whole one."""
    code = "from grass.cpu import kernel as cpu_kernel; print(cpu_kernel.at_hand())"
    command, env = [sys.executable, "-c", code], {**cpu_kernel.os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in started] == ["True"] * 4
    assert [path.suffix for path in (tmp_path / "grass").iterdir()] == [".so"]
