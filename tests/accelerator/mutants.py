"""Takes one wait out of the package at a time, and says which test on the stand-in fails.

``python tests/accelerator/mutants.py`` prints the table of ``README.md``. It edits the files of this checkout and puts
each back at once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTHING = "pass"
ON_RANKS = "grass/distributed/"
"""What lies here is tried with several processes, the rest with one."""
MUTANTS = {
    "grass/machine/pinned_buffers.py": [
        ("copy down: wait for what writes the source", "self._down_stream.wait_event(after)", NOTHING),
        ("copy down: wait for the piece before it is read", "events[i].synchronize()", NOTHING),
        ("copy up: wait for what reads the target", "self._up_stream.wait_event(after)", NOTHING),
        ("copy up: wait for a buffer before it is filled again", "events[i - SLOTS].synchronize()", NOTHING),
        ("copy up: wait for the last pieces", "        self._up_stream.synchronize()", "        pass"),
        ("copy up, pinned: wait for the copy", "source, out).synchronize()", "source, out)"),
    ],
    "grass/parallel/background.py": [
        ("exchange: wait for earlier work", "current_stream(device).wait_event(before)", NOTHING),
        ("exchange: the next step waits for it", "current.wait_event(done)", NOTHING),
        ("exchange: record_stream of what it made", "value.record_stream(current)", NOTHING),
        ("exchange: keep what it reads", "kept = work, list(state.values())", "kept = None"),
    ],
    "grass/state/bank.py": [
        ("bank: wait for rows before the host reads them", "current_stream(rows.device).synchronize()", NOTHING),
    ],
    "grass/offload/host_copies.py": [
        ("offload: mark of the gradient", "self._mark = link.mark()", "self._mark = None"),
        ("offload: mark of arriving rows", "self._selected, link.mark())", "self._selected, None)"),
        ("offload: mark of what arrives", "link.up(values, there, link.mark())", "link.up(values, there, None)"),
    ],
    "grass/offload/device_step.py": [
        ("visit: mark of the state that comes", "self._there[key], link.mark())", "self._there[key], None)"),
        ("visit: mark of the stepped state", "mark, state = link.mark(),", "mark, state = None,"),
        (
            "visit: the count of a rounded parameter stays on the host",
            'HOST_KEYS | {"step"} if counts_on_host',
            "HOST_KEYS if counts_on_host",
        ),
    ],
    "grass/streaming/gradients.py": [
        ("stream: mark of a gradient", "mark = self._link.mark()", "mark = None"),
    ],
    "grass/streaming/activations.py": [
        ("stream: mark of an activation that leaves", "        mark = link.mark()", "        mark = None"),
        ("stream: mark of an activation that returns", "        mark = self._link.mark()", "        mark = None"),
    ],
    "grass/streaming/device_block.py": [
        ("stream: mark of a unit that comes", "mark = self._link.mark()", "mark = None"),
    ],
    "grass/streaming/micro_batches.py": [
        ("micro-batches: threads take over the stream", "stack.enter_context(on(self._stream))", NOTHING),
    ],
    "grass/distributed/parallel_2d/mesh.py": [
        (
            "grid: gathered blocks can be waited for",
            "collectives.allow_inflight_collective_as_graph_input_ctx()",
            "torch.no_grad()",
        ),
        ("grid: wait for a result", "done: Tensor = x.wait()", "done: Tensor = x.elem"),
    ],
    "grass/distributed/reduced_allreduce.py": [
        (
            "reduced all-reduce: wait for it",
            "state.reduce_(flat, async_op=True).get_future().then(unpack)",
            "(state.reduce_(flat, True), now := torch.futures.Future(), now.set_result([flat]))[1].then(unpack)",
        ),
        ("reduced all-reduce: rows of offloaded state", "Projector(indices.to(self.grad.device)", "Projector(indices"),
    ],
}


def failing_test(name: str) -> str:
    """The first quick test that fails; empty if none does."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "python_files=on_*.py", "-m", "not slow"]
    file = HERE / ("on_ranks.py" if name.startswith(ON_RANKS) else "on_training.py")
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    found = re.search(r"^(?:FAILED|ERROR) \S+::(test_\w+(?:\[.*?\])?)", done.stdout, flags=re.MULTILINE)
    return found[1] if found else "" if done.returncode == 0 else f"exit status {done.returncode}"


def main() -> None:
    """Print a row for each mutant."""
    print("| taken out | fails |\n|---|---|", flush=True)
    for name, mutants in MUTANTS.items():
        path = ROOT / name
        source = path.read_text()
        for what, old, new in mutants:
            assert source.count(old) == 1, (name, old)
            try:
                path.write_text(source.replace(old, new))
                print(f"| {what} | `{failing_test(name) or 'nothing'}` |", flush=True)
            finally:
                path.write_text(source)


if __name__ == "__main__":
    main()
