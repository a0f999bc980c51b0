"""The tables of README and docs/, each made from a CSV in benchmarks/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from page_tables import (
    distributed,
    exploring,
    finetuning,
    gpu,
    headers,
    hosts,
    law,
    memory,
    methods,
    models,
    offload,
    precision,
    setups,
    speed,
    streaming,
    study,
    support,
    sweep,
)

TABLES: dict[str, Callable[[], str]] = {
    "train_step": speed.train_step,
    "optimizer_step": speed.optimizer_step,
    "small_weights": speed.small_weights,
    "gpu_steps": gpu.steps,
    "gpu_kernels": gpu.kernels,
    "gpu_widths": gpu.widths,
    "gpu_rates": gpu.rates,
    "gpu_one_rate": gpu.one_rate,
    "host_time": gpu.host_time,
    "study_speed": speed.study_speed,
    "memory": memory.memory,
    "planned_shares": memory.planned_shares,
    "planned_gpus": setups.planned_gpus,
    "planned_sharded": memory.planned_sharded,
    "saved_activations": memory.saved_activations,
    "models": models.models,
    "planned": memory.planned,
    "planner": memory.planner,
    "setups": setups.setups,
    "precision": precision.precision,
    "int8_quality": precision.int8_quality,
    "wire_bytes": distributed.wire_bytes,
    "grid_link": distributed.grid_link,
    "slow_link": distributed.slow_link,
    "hosts": hosts.hosts,
    "uneven": distributed.uneven,
    "offload": offload.offload,
    "streaming": streaming.streaming,
    "support": support.support,
    "loss": study.loss,
    "reach": study.reach,
    "finals": study.finals,
    "frontier": exploring.frontier,
    "width": exploring.width,
    "widest": methods.widest,
    "long_methods": methods.long_methods,
    "law_fit": law.law_fit,
    "law_losses": law.law_losses,
    "long_runs": exploring.long_runs,
    "residual_mlp": exploring.residual_mlp,
    "word_counts": exploring.word_counts,
    "headers": headers.headers,
    "muon": exploring.muon,
    "law": partial(law.law, "270"),
    "law_short": partial(law.law, "540"),
    "law_full": partial(law.law, "2150"),
    "precisions": law.precisions,
    "starting_rates": law.starting_rates,
    "balanced": exploring.balanced,
    "patched": exploring.patched,
    "sharing": exploring.sharing,
    "reach_by_horizon": exploring.reach_by_horizon,
    "adapters": finetuning.adapters,
    "adapters_float32": finetuning.adapters_float32,
    "embeddings_too": finetuning.embeddings_too,
    "sweep_search": sweep.search,
    "sweep_stopping": sweep.stopping,
}


def make(name: str) -> str:
    """The table of a marker; ``study X`` is that of a study in ``benchmarks/quality/grid.yaml``.

    Raises:
        ValueError: there is no such table.
    """
    if name.startswith("study "):
        return study.study(name.removeprefix("study "))
    if name not in TABLES:
        raise ValueError(f"There is no table {name!r}; available: {', '.join(TABLES)}, study NAME")
    return TABLES[name]()
