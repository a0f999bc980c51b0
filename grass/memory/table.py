"""Plans of several methods side by side, as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

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
from grass.offload.tasks import makespan
from grass.selection.exploration import auto_scale

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


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is asked of the planner, and its answer as text.

    Attributes:
        name: of the model.
        model: its sizes.
        setting: how it is trained.
        gpu: bytes of a GPU, to say what fits.
        host: bytes of host memory, likewise.
        machine: whose rates say how long steps take.
        tokens: to be trained on, to say how many days they take; with ``tflops``.
        tflops: of training, on each GPU.
        gpus: that train together.
        sweep: to say how long it takes; with ``tflops``, or ``machine`` says how long a step takes.
    """

    name: str
    model: Architecture
    setting: Setting
    gpu: int | None = None
    host: int | None = None
    machine: Machine | None = None
    tokens: float | None = None
    tflops: float | None = None
    gpus: int = 1
    sweep: Sweep | None = None

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """A plan of each method that can have one."""
        return {method: plan(method, self.model, self.setting) for method in planned_methods(self.setting)}

    def __str__(self) -> str:
        rows = [["", *self.plans], *self._memory()]
        rows += self._host() if self.setting.offload else []
        rows += self._steps()
        rows += self._fitting(self.gpu) if self.gpu is not None else []
        rows += self._days(self.tokens, self.tflops) if self.tokens is not None and self.tflops is not None else []
        rows += self._sweep(self.sweep) if self.sweep is not None else []
        above = heading(self.name, self.model, self.setting, self.gpu)
        return "\n".join([above, "", *aligned(rows), "", *self._notes()])

    def _memory(self) -> list[list[str]]:
        """What a device holds, the activations also as they would be otherwise."""
        setting, rows = self.setting, []
        for field, label in CATEGORIES.items():
            if field == "gathered" and setting.shards == 1:
                continue
            rows.append([_label(field, label, setting.checkpointing), *self._each(field)])
            if field == "activations" and not setting.stream:
                other = replace(setting, checkpointing=not setting.checkpointing)
                others = [_gb(plan(method, self.model, other).activations) for method in self.plans]
                rows.append([f"  ({_label(field, label, other.checkpointing)})", *others])
        return [
            *rows,
            ["peak", *self._each("peak")],
            [f"allocator slack, {setting.slack:.0%}", *self._each("slack")],
            ["total", *self._each("total")],
            ["bank on host", *self._each("bank")],
        ]

    def _each(self, field: str) -> list[str]:
        """A field of the plans."""
        return [_gb(getattr(p, field)) for p in self.plans.values()]

    def _host(self) -> list[list[str]]:
        """What the host holds."""
        plans = self.plans.values()
        rows = [[f"{f.replace('_', ' ')} on host", *(_gb(getattr(p.host, f)) for p in plans)] for f in Host._fields]
        if self.setting.files:
            rows.append(["of these in files", *self._each("files")])
        return [*rows, ["total on host", *self._each("on_host")]]

    def _steps(self) -> list[list[str]]:
        """How long a step takes that is streamed or offloaded, and what it loads."""
        if self.setting.stream:
            return _streaming(self.model, self.setting, self.machine)
        if not self.setting.offload or self.machine is None:
            return []
        seconds = [_seconds(method, self.model, self.setting, self.machine) for method in self.plans]
        return [["step, link and update, s", *seconds]]

    def _fitting(self, gpu: int) -> list[list[str]]:
        """What fits a GPU, and the host."""
        largest = [largest_that_fit(method, self.model, self.setting, gpu, self.host) for method in self.plans]
        sizes = format_bytes(gpu) + ("" if self.host is None else f", host {format_bytes(self.host)}")
        return [
            [f"fits {sizes}", *("yes" if p.fits(gpu, self.host) else "no" for p in self.plans.values())],
            ["largest rank", *(_count(fit.rank) for fit in largest)],
            ["largest batch", *(_count(fit.batch_size) for fit in largest)],
            ["largest sequence", *(_count(fit.seq_len) for fit in largest)],
        ]

    def _days(self, tokens: float, tflops: float) -> list[list[str]]:
        """How long so many tokens take."""
        every = [days(method, self.model, self.setting, tokens, self.gpus * tflops) for method in self.plans]
        each = f"{self.gpus} x " if self.gpus > 1 else ""
        return [[f"days, {tokens:.3g} tokens, {each}{tflops:g} TFLOP/s", *(f"{n:,.3g}" for n in every)]]

    def _sweep(self, sweep: Sweep) -> list[list[str]]:
        """Hours of a sweep, and how many of its trials fit host memory at a time."""
        seconds = [self._sweep_seconds(method) for method in self.plans]
        hours = [None if s is None else sweep.hours(s, self.setting.batch_size) for s in seconds]
        labels = (f"pool of {sweep.devices} devices", "one device", f"pipelined over {sweep.devices} devices")
        rows = [
            [f"hours, {label}", *("-" if h is None else f"{h[i]:,.3g}" for h in hours)]
            for i, label in enumerate(labels)
        ]
        if (host := self.host) is not None and self.setting.offload:
            plans = self.plans.items()
            fits = ["-" if m not in OFFLOADABLE else str(host // max(p.on_host, 1)) for m, p in plans]
            rows.append([f"trials at a time in {format_bytes(host)} of host memory", *fits])
        return rows

    def _sweep_seconds(self, method: str) -> float | None:
        """How long a step of a trial takes; ``None`` for a method that cannot be streamed."""
        model, setting = self.model, self.setting
        if self.machine is None or not setting.stream:
            assert self.tflops is not None
            return days(method, model, setting, setting.tokens, self.tflops) * SECONDS_OF_A_DAY
        if method not in OFFLOADABLE:
            return None
        return step_seconds(method, METHODS[method](model, setting), model, setting, self.machine)

    def _notes(self) -> list[str]:
        """What the numbers take for granted."""
        setting, machine = self.setting, self.machine
        notes = ["GB are 10^9 bytes. The peak is less than the sum: gradients grow while activations shrink."]
        notes += _of_several(setting, self.gpus)
        notes += _rates(setting, self.model, [m for m in ("Grass", "Grass int8") if m in self.plans])
        if setting.offload:
            how = "Streamed" if setting.stream else "Offloaded"
            notes.append(f"{how}: {', '.join(OFFLOADABLE)}; the others cannot be.")
        if setting.offload and machine is not None:
            whose = f"Seconds are simulated with the rates of {machine.name or 'a machine without a name'}. "
            notes.append(whose + _what_is_timed(setting, machine))
        if self.tokens is not None:
            notes.append("Days count the products with weights only, not attention, optimizer steps or copies.")
        if (sweep := self.sweep) is not None:
            counted = " Hours count the products only; with --machine copies and updates too."
            notes.append(
                f"Sweep: {sweep.trials} trials of {sweep.steps} steps. Pipelined: micro-batches of one sequence, "
                f"{setting.batch_size} in all, and stages that are equally long."
                + ("" if self.tflops is None or (setting.stream and machine is not None) else counted)
            )
        return notes + [f"Peak of {method}: {p.peak_at}." for method, p in self.plans.items()]


def _rates(setting: Setting, model: Architecture, methods: list[str]) -> list[str]:
    """What compact mode multiplies AdamW's learning rate of linear layers by."""
    sizes = {linear.size(setting.dim) for linear in model.linears}
    factors = {auto_scale(n, setting.rank_of(n), setting.explored_of(n)) for n in sizes}
    times = " to ".join(dict.fromkeys(f"{factor:.3g}" for factor in (min(factors), max(factors))))
    return [f"{', '.join(methods)}: linear layers train at {times} times AdamW's learning rate (scale='auto')."]


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
        ["step, s", *("-" if s is None else _digits(s) for s in seconds)],
        ["tokens a second", *("-" if s is None else _digits(setting.tokens / s) for s in seconds)],
    ]


def _digits(value: float) -> str:
    """At least three: 8,960 and 0.229."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def heading(name: str, model: Architecture, setting: Setting, gpu: int | None) -> str:
    """What is planned, in words."""
    loss = f"loss in chunks of {setting.chunk_tokens} tokens" if setting.chunk_tokens else "whole logits"
    explored = "as many explored as rank" if setting.explore is None else f"{setting.explore} explored"
    lora = "LoRA" in planned_methods(setting)
    parts = [
        f"{name}: {_number(model.parameters)} parameters, {model.layers} layers",
        f"rank {setting.rank}, dim {setting.dim}, batch {setting.batch_size}, sequence {setting.seq_len}, {loss}",
        f"Grass: {explored}, selection {setting.selection}, policy {setting.state_policy}, "
        f"moments {setting.moment_dtype}",
        f"weights {_dtype(setting.dtype)}, active rows{' and adapters' * lora} {_dtype(setting.active_dtype)}"
        + f", rank of adapters {setting.lora_rank}" * lora,
    ]
    return "\n".join(parts + ([f"GPU of {gpu:,} bytes"] if gpu is not None else []))


def _number(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:,.2f} billion" if billions >= 0.1 else f"{billions * 1e3:,.2f} million"


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
    return f"{makespan(step_tasks(method, model, setting), machine.seconds):,.3g}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of cells: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
