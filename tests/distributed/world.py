"""Run a function in several processes joined by gloo; errors come back as values, and so does a hang.

The processes are forked from a server that has imported everything once, so that a world costs a fraction of a second.
"""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "grass.distributed",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        __name__,
    ]
)
HANG = "no answer in time"
LIMIT = 1200.0
"""Seconds after which a process hangs: no test takes as long on the slowest machine. Pytest's own limit is longer."""


@dataclass
class Outcome:
    """What one rank returned, or how it failed."""

    value: Any = None
    error: str | None = None


PATIENT = ",".join(
    f"{name}={int(LIMIT)}"
    for name in ("read_timeout", "join_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_max_attempt")
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-conf", PATIENT]
"""``torchrun`` with two processes, as patient as the tests."""


def run_world(body: Callable[..., Any], size: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """``body(rank, *args)`` on every rank: what each returned. Fails if any rank does."""
    outcomes = attempt_world(body, size, *args, backend=backend)
    failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed.items())
    return [outcome.value for outcome in outcomes]


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test run in a process of its own, joined by a group of one; its arguments are pickled.

    A process that goes on after its groups were destroyed may hang: gloo's threads drop what they hold, for which they
    need Python, while Python waits for their end.
    """

    @functools.wraps(test)
    def alone(**arguments: Any) -> None:
        run_world(_undecorated, 1, test.__module__, test.__name__, arguments)

    return alone


def _undecorated(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def attempt_world(body: Callable[..., Any], size: int, *args: Any, backend: str = "gloo") -> list[Outcome]:
    """As :func:`run_world`, with errors returned.

    A rank waits for another twice as long as the world lasts: an error is never one of gloo's own timeouts.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            settings = backend, rank, size, Path(folder) / "store", theirs
            processes.append(CONTEXT.Process(target=_member, args=(body, settings, args), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        outcomes = _collect(pipes, time.monotonic() + LIMIT)
        for process in processes:
            process.kill()
            process.join()
        return outcomes


def _collect(pipes: list[Connection], deadline: float) -> list[Outcome]:
    outcomes = [Outcome(error=HANG) for _ in pipes]
    pending = dict(zip(pipes, outcomes, strict=True))
    while pending and time.monotonic() < deadline:
        for pipe in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
            outcome = pending.pop(pipe)
            try:
                outcome.value, outcome.error = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True)
            except EOFError:
                outcome.error = "died"
    return outcomes


def _member(body: Callable[..., Any], settings: tuple[str, int, int, Path, Connection], args: tuple) -> None:
    backend, rank, size, store, pipe = settings
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=2 * LIMIT)
        )
        result = body(rank, *args), None
    except BaseException:
        result = None, traceback.format_exc()
    answer = io.BytesIO()
    torch.save(result, answer)
    pipe.send_bytes(answer.getvalue())
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # past destructors that would wait for a rank that failed
