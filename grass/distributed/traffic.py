"""What a process communicates, as recorded by torch's profiler, not computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

ITEM_SIZES = {
    "double": 8,
    "long": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned char": 1,
}


@contextmanager
def recorded_traffic() -> Iterator[dict[str, int]]:
    """Count, by gloo collective, the bytes of the operands that this rank hands over in the block.

    The counts are there when the block has ended. What crosses the wire is the collective's own multiple of that: a
    ring all-reduce over ``w`` ranks sends ``2 (w - 1) / w`` times as much from each.
    """
    counts: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield counts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        if event.get("name", "").startswith("gloo:"):
            name, arguments = event["name"].removeprefix("gloo:"), event["args"]
            for shape, dtype in zip(arguments["Input Dims"], arguments["Input type"], strict=True):
                counts[name] = counts.get(name, 0) + prod(shape) * ITEM_SIZES[dtype]
