"""Plans of several methods side by side, as text."""

from __future__ import annotations

from dataclasses import replace

from grass.memory.architecture import Architecture
from grass.memory.fits import largest_that_fit
from grass.memory.methods import METHODS, OFFLOADABLE, Host
from grass.memory.offloading import step_tasks
from grass.memory.planner import Plan, plan
from grass.memory.setting import Setting
from grass.memory.units import format_bytes
from grass.offload.machine import Machine
from grass.offload.tasks import simulate

CATEGORIES = {
    "weights": "weights",
    "active_rows": "active rows, adapters",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "activations",
    "loss": "logits and loss",
    "workspace": "workspace",
}


def render(name: str, model: Architecture, setting: Setting, gpu: int | None, machine: Machine | None = None) -> str:
    """The table; with a ``gpu`` of so many bytes what fits it; with a ``machine`` how long offloaded steps take."""
    plans = {method: plan(method, model, setting) for method in METHODS}
    other = replace(setting, checkpointing=not setting.checkpointing)
    others = [plan(method, model, other).activations for method in METHODS]
    rows = [["", *plans]] + [
        [_label(field, label, setting.checkpointing), *(_gb(getattr(p, field)) for p in plans.values())]
        for field, label in CATEGORIES.items()
    ]
    index = 1 + list(CATEGORIES).index("activations")
    rows.insert(index + 1, [f"  ({_label('activations', 'activations', other.checkpointing)})", *map(_gb, others)])
    rows += [
        ["peak", *(_gb(p.peak) for p in plans.values())],
        [f"allocator slack, {setting.slack:.0%}", *(_gb(p.slack) for p in plans.values())],
        ["total", *(_gb(p.total) for p in plans.values())],
        ["bank on host", *(_gb(p.bank) for p in plans.values())],
    ]
    if setting.offload:
        rows += [
            [f"{field.replace('_', ' ')} on host", *(_gb(getattr(p.host, field)) for p in plans.values())]
            for field in Host._fields
        ]
        if setting.files:
            rows.append(["of these in files", *(_gb(p.files) for p in plans.values())])
        rows.append(["total on host", *(_gb(p.on_host) for p in plans.values())])
    if setting.offload and machine is not None:
        rows.append(["step, link and update, s", *(_seconds(method, model, setting, machine) for method in plans)])
    if gpu is not None:
        rows += _fitting(plans, model, setting, gpu)
    notes = ["GB are 10^9 bytes. The peak is less than the sum: gradients grow while activations shrink."]
    if setting.offload:
        notes.append(f"Offloaded: {', '.join(OFFLOADABLE)}; the others cannot be.")
    if setting.offload and machine is not None:
        notes.append(
            f"Seconds are simulated with the rates of {machine.name or 'a machine without a name'}. "
            "The next forward hides some of them."
        )
    notes += [f"Peak of {method}: {p.peak_at}." for method, p in plans.items()]
    return "\n".join([_heading(name, model, setting, gpu), "", *_aligned(rows), "", *notes])


def _fitting(plans: dict[str, Plan], model: Architecture, setting: Setting, gpu: int) -> list[list[str]]:
    largest = [largest_that_fit(method, model, setting, gpu) for method in plans]
    return [
        [f"fits {format_bytes(gpu)}", *("yes" if p.total <= gpu else "no" for p in plans.values())],
        ["largest rank", *(_count(fit.rank) for fit in largest)],
        ["largest batch", *(_count(fit.batch_size) for fit in largest)],
        ["largest sequence", *(_count(fit.seq_len) for fit in largest)],
    ]


def _heading(name: str, model: Architecture, setting: Setting, gpu: int | None) -> str:
    loss = f"loss in chunks of {setting.chunk_tokens} tokens" if setting.chunk_tokens else "whole logits"
    explored = "as many explored as rank" if setting.explore is None else f"{setting.explore} explored"
    parts = [
        f"{name}: {model.parameters / 1e9:,.2f} billion parameters, {model.layers} layers",
        f"rank {setting.rank}, dim {setting.dim}, batch {setting.batch_size}, sequence {setting.seq_len}, {loss}",
        f"Grass: {explored}, selection {setting.selection}, policy {setting.policy}, moments {setting.moments}",
        f"weights {_dtype(setting.dtype)}, active rows {_dtype(setting.active_dtype)}",
    ]
    return "\n".join(parts + ([f"GPU of {gpu:,} bytes"] if gpu is not None else []))


def _label(field: str, label: str, checkpointing: bool) -> str:
    return f"{label}, {'checkpointed' if checkpointing else 'all saved'}" if field == "activations" else label


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else "-"


def _seconds(method: str, model: Architecture, setting: Setting, machine: Machine) -> str:
    if method not in OFFLOADABLE:
        return "-"
    return f"{simulate(step_tasks(method, model, setting), machine.seconds).makespan:,.3g}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
