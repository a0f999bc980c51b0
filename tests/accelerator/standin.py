"""A stand-in accelerator, as hostile as a GPU: ``torch.standin``, built from C++ on first use.

Its memory faults when the host touches it. Operators are queued on streams and run late, in an order that a seed draws
from what streams and events allow. Freed blocks are poisoned and handed out again at once. :func:`install` registers
the device for the whole process, so tests that use it run in a process of their own (``test_accelerator.py``).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.cpp"))
HEADER = Path(__file__).with_name("csrc") / "standin.h"
FLAGS = ["-O1", "-std=c++20", "-fno-var-tracking", "-w"]
DEVICES = 2
GROUP = "cpu:gloo,standin:standin_gloo"
"""The backends of a process group that takes tensors of the host and of the device."""
Index = int | str | torch.device | None


def why_not() -> str | None:
    """Why the stand-in cannot be built here; ``None``: it can."""
    if not sys.platform.startswith("linux"):
        return "the stand-in accelerator needs Linux"
    missing = [tool for tool in ("ninja", os.environ.get("CXX", "g++")) if shutil.which(tool) is None]
    return f"the stand-in accelerator is built by {' and '.join(missing)}, not found here" if missing else None


@functools.cache
def built() -> Path:
    """The library's file, built or found in the user's cache."""
    parts = [*(path.read_bytes() for path in (*SOURCES, HEADER)), repr((FLAGS, torch.__version__)).encode()]
    name = f"standin_{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grass" / name
    file = root / f"{name}.so"
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as own:  # two processes build at once, and one may be killed
            cpp_extension.load(name, [*map(str, SOURCES)], FLAGS, build_directory=own, is_python_module=False)
            os.replace(Path(own) / file.name, file)
    return file


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded."""
    file = built()
    torch.ops.load_library(file)
    loaded = ctypes.CDLL(str(file))
    loaded.standin_pinned_bytes.restype = ctypes.c_int64
    loaded.standin_tasks_run.restype = ctypes.c_uint64
    loaded.standin_take_fault.restype = ctypes.c_int64
    loaded.standin_seed_order.argtypes = [ctypes.c_uint64]
    loaded.standin_eager.argtypes = [ctypes.c_bool]
    loaded.standin_budget.argtypes = [ctypes.c_int, ctypes.c_int64]
    return loaded


@functools.cache
def install() -> None:
    """Register the accelerator in this process, for good."""
    library()
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("standin_gloo", _collectives, devices=["standin"])


def seed_order(seed: int) -> None:
    """Draw the order in which tasks run from this seed."""
    library().standin_seed_order(seed)


@contextmanager
def eager() -> Iterator[None]:
    """Run every task as soon as it is queued, so that nothing races."""
    library().standin_eager(True)
    try:
        yield
    finally:
        library().standin_eager(False)


@contextmanager
def budget(nbytes: int, device: int = 0) -> Iterator[None]:
    """Let a device have so many bytes."""
    torch.accelerator.empty_cache()
    library().standin_budget(device, nbytes)
    try:
        yield
    finally:
        library().standin_budget(device, 1 << 30)


def pinned_bytes() -> int:
    """Bytes of pinned host memory in use."""
    return int(library().standin_pinned_bytes())


def tasks_run() -> int:
    """How many tasks have run."""
    return int(library().standin_tasks_run())


def take_fault() -> str:
    """What the first operator that failed on the device said, which every synchronisation raises until now."""
    text = ctypes.create_string_buffer(4096)
    library().standin_take_fault(text, 4096)
    return text.value.decode()


def end() -> str:
    """Run all tasks that are left; what the first operator that failed said, if one has."""
    for device in range(DEVICES):
        with suppress(RuntimeError):
            torch.accelerator.synchronize(device)
    return take_fault()


def _collectives(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """What communicates about tensors of the device in a process group (``csrc/collectives.cpp``)."""
    on_host = dist.ProcessGroupGloo(dist.PrefixStore("on_host", store), rank, size, timeout)
    return _bindings().collectives(store, on_host)


@functools.cache
def _bindings() -> Any:
    spec = importlib.util.spec_from_file_location(built().stem, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index(device: Index) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _module() -> types.ModuleType:
    """``torch.standin``: what torch asks of the module of a device."""
    module: Any = types.ModuleType("torch.standin")

    def get_rng_state(device: Index = None) -> torch.Tensor:
        state = (ctypes.c_uint64 * 2)()
        library().standin_get_random(_index(device), state)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()

    def set_rng_state(new_state: torch.Tensor, device: Index = None) -> None:
        library().standin_set_random(_index(device), (ctypes.c_uint64 * 2).from_buffer_copy(bytes(new_state.tolist())))

    def manual_seed(seed: int, device: Index = None) -> None:
        library().standin_set_random(_index(device), (ctypes.c_uint64 * 2)(seed % (1 << 64), 0))

    @contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        before, index = torch.accelerator.current_stream(chosen.device), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def manual_seed_all(seed: int) -> None:
        for device in range(DEVICES):
            manual_seed(seed, device)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True  # checkpoint() asks
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.device = lambda device: torch.accelerator.device_index(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream, module.Event, module.stream = torch.Stream, torch.Event, stream
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    return module  # type: ignore[no-any-return]
