"""Plans of several methods side by side, as text."""

from __future__ import annotations

import math
from dataclasses import replace

from grass.machine.rates import Machine
from grass.memory.architecture import Architecture
from grass.memory.duration import SECONDS_OF_A_DAY, days
from grass.memory.fits import largest_that_fit
from grass.memory.methods import METHODS, OFFLOADABLE, Host
from grass.memory.offloading import step_tasks
from grass.memory.planner import Plan, plan, planned_methods
from grass.memory.setting import Setting
from grass.memory.streaming import step_seconds, visiting
from grass.memory.sweep import Sweep
from grass.memory.units import format_bytes
from grass.offload.tasks import simulate

CATEGORIES = {
    "weights": "weights",
    "active_rows": "active rows, adapters",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "activations",
    "loss": "logits and loss",
    "gathered": "gathered, gradients on their way",
    "workspace": "workspace",
}


def render(
    name: str,
    model: Architecture,
    setting: Setting,
    gpu: int | None,
    machine: Machine | None = None,
    host: int | None = None,
    budget: tuple[float, float] | None = None,
    sweep: tuple[Sweep, float | None] | None = None,
    gpus: int = 1,
) -> str:
    """The table; with a ``gpu`` (and a ``host``) of so many bytes what fits; with a ``machine`` how long steps take.

    ``budget`` is a number of tokens and the TFLOP/s of training on each of ``gpus``: with it, how many days they take.
    ``sweep`` has the TFLOP/s too, or ``None`` if ``machine`` says how long a step takes.
    """
    plans = {method: plan(method, model, setting) for method in planned_methods(setting)}
    rows = [["", *plans]] + [
        [_label(field, label, setting.checkpointing), *(_gb(getattr(p, field)) for p in plans.values())]
        for field, label in CATEGORIES.items()
        if field != "gathered" or setting.shards > 1
    ]
    if not setting.stream:
        other = replace(setting, checkpointing=not setting.checkpointing)
        others = [plan(method, model, other).activations for method in plans]
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
    if setting.stream:
        rows += _streaming(model, setting, machine)
    elif setting.offload and machine is not None:
        rows.append(["step, link and update, s", *(_seconds(method, model, setting, machine) for method in plans)])
    if gpu is not None:
        rows += _fitting(plans, model, setting, gpu, host)
    if budget is not None:
        tokens, tflops = budget
        every = [f"{days(method, model, setting, tokens, gpus * tflops):,.3g}" for method in plans]
        each = f"{gpus} x " if gpus > 1 else ""
        rows.append([f"days, {tokens:.3g} tokens, {each}{tflops:g} TFLOP/s", *every])
    if sweep is not None:
        rows += _sweep(plans, model, setting, *sweep, machine, host)
    notes = ["GB are 10^9 bytes. The peak is less than the sum: gradients grow while activations shrink."]
    notes += _of_several(setting, gpus)
    if setting.offload:
        notes.append(
            f"{'Streamed' if setting.stream else 'Offloaded'}: {', '.join(OFFLOADABLE)}; the others cannot be."
        )
    if setting.offload and machine is not None:
        notes.append(
            f"Seconds are simulated with the rates of {machine.name or 'a machine without a name'}. "
            + _what_is_timed(setting, machine)
        )
    if budget is not None:
        notes.append("Days count the products with weights only, not attention, optimizer steps or copies.")
    if sweep is not None:
        notes.append(
            f"Sweep: {sweep[0].trials} trials of {sweep[0].steps} steps. Pipelined: micro-batches of one sequence, "
            f"{setting.batch_size} in all, and stages that are equally long."
            + (" Hours count the products only; with --machine copies and updates too." if sweep[1] is not None else "")
        )
    notes += [f"Peak of {method}: {p.peak_at}." for method, p in plans.items()]
    return "\n".join([heading(name, model, setting, gpu), "", *aligned(rows), "", *notes])


def _of_several(setting: Setting, gpus: int) -> list[str]:
    """What a plan for several GPUs takes for granted."""
    if gpus == 1:
        return []
    if setting.shards == 1:
        return [f"Each of {gpus} GPUs holds all of this: DDP with gradient_as_bucket_view=True."]
    return [
        f"Each of {gpus} GPUs: fully_shard of each block and of the model, resharded after forward; Grass with "
        "shard_placement_fn. AdamW float32 with MixedPrecisionPolicy, all else in the weights' dtype. Methods that "
        "have no plan here are left out."
    ]


def _sweep(
    plans: dict[str, Plan],
    model: Architecture,
    setting: Setting,
    sweep: Sweep,
    tflops: float | None,
    machine: Machine | None,
    host: int | None,
) -> list[list[str]]:
    """Hours of a sweep, and how many of its trials fit host memory at a time."""
    seconds: list[float | None] = []
    for method in plans:
        held = METHODS[method](model, setting) if method in OFFLOADABLE else None
        if tflops is not None:
            seconds.append(days(method, model, setting, setting.tokens, tflops) * SECONDS_OF_A_DAY)
        else:
            assert machine is not None
            seconds.append(None if held is None else step_seconds(method, held, model, setting, machine))
    hours = [None if s is None else sweep.hours(s, setting.batch_size) for s in seconds]
    labels = (f"pool of {sweep.devices} devices", "one device", f"pipelined over {sweep.devices} devices")
    rows = [
        [f"hours, {label}", *("-" if h is None else f"{h[i]:,.3g}" for h in hours)] for i, label in enumerate(labels)
    ]
    if host is not None and setting.offload:
        fits = ["-" if m not in OFFLOADABLE else str(host // max(p.on_host, 1)) for m, p in plans.items()]
        rows.append([f"trials at a time in {format_bytes(host)} of host memory", *fits])
    return rows


def _streaming(model: Architecture, setting: Setting, machine: Machine | None) -> list[list[str]]:
    """Units and, with a machine, the predicted seconds of a step and tokens a second."""
    held = {method: METHODS[method](model, setting) if method in OFFLOADABLE else None for method in METHODS}
    units = [None if h is None else visiting(h, model, setting) for h in held.values()]
    rows = [
        ["one unit", *("-" if unit is None else _gb(unit.nbytes) for unit in units)],
        ["units on the device, of all", *("-" if u is None else f"{u.on_device} of {u.number}" for u in units)],
        ["loads of a step", *("-" if unit is None else str(unit.loads) for unit in units)],
    ]
    if machine is None:
        return rows
    seconds = [None if h is None else step_seconds(method, h, model, setting, machine) for method, h in held.items()]
    return [
        *rows,
        ["step, s", *("-" if s is None else f"{s:,.3g}" for s in seconds)],
        ["tokens a second", *("-" if s is None else f"{setting.tokens / s:,.0f}" for s in seconds)],
    ]


def _fitting(
    plans: dict[str, Plan], model: Architecture, setting: Setting, gpu: int, host: int | None
) -> list[list[str]]:
    largest = [largest_that_fit(method, model, setting, gpu, host) for method in plans]
    sizes = format_bytes(gpu) + ("" if host is None else f", host {format_bytes(host)}")
    return [
        [f"fits {sizes}", *("yes" if p.fits(gpu, host) else "no" for p in plans.values())],
        ["largest rank", *(_count(fit.rank) for fit in largest)],
        ["largest batch", *(_count(fit.batch_size) for fit in largest)],
        ["largest sequence", *(_count(fit.seq_len) for fit in largest)],
    ]


def heading(name: str, model: Architecture, setting: Setting, gpu: int | None) -> str:
    """What is planned, in words."""
    loss = f"loss in chunks of {setting.chunk_tokens} tokens" if setting.chunk_tokens else "whole logits"
    explored = "as many explored as rank" if setting.explore is None else f"{setting.explore} explored"
    parts = [
        f"{name}: {model.parameters / 1e9:,.2f} billion parameters, {model.layers} layers",
        f"rank {setting.rank}, dim {setting.dim}, batch {setting.batch_size}, sequence {setting.seq_len}, {loss}",
        f"Grass: {explored}, selection {setting.selection}, policy {setting.state_policy}, "
        f"moments {setting.moment_dtype}",
        f"weights {_dtype(setting.dtype)}, active rows and adapters {_dtype(setting.active_dtype)}, "
        f"rank of adapters {setting.lora_rank}",
    ]
    return "\n".join(parts + ([f"GPU of {gpu:,} bytes"] if gpu is not None else []))


def _label(field: str, label: str, checkpointing: bool) -> str:
    return f"{label}, {'checkpointed' if checkpointing else 'all saved'}" if field == "activations" else label


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _what_is_timed(setting: Setting, machine: Machine) -> str:
    if not setting.stream:
        return "The next forward hides some of them."
    return "Computing was not measured and is left out." if math.isinf(machine.compute_rate) else ""


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}" if size else "-"


def _seconds(method: str, model: Architecture, setting: Setting, machine: Machine) -> str:
    if method not in OFFLOADABLE:
        return "-"
    return f"{simulate(step_tasks(method, model, setting), machine.seconds).makespan:,.3g}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of cells: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
