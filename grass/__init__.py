"""Grass for PyTorch: an AdamW that keeps and updates only selected rows of each weight's gradient."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

if importlib.util.find_spec("grass.kernels") is None:
    raise ImportError(
        f"grass is imported from {__path__[0]}, which is not installed: its kernels lie in another folder. Run "
        "`pip install -e .` in the checkout instead of adding it to PYTHONPATH"
    )

from grass import diagnostics, memory
from grass.averaging import AveragedModel
from grass.changed_columns import load_columns, save_columns
from grass.compact_mode.attach import Attachment, attach
from grass.compact_mode.calibration import calibrate
from grass.compact_mode.conversion import compact, expand
from grass.compact_mode.experts import expert_linear
from grass.compact_mode.linear_classes import register_linear
from grass.groups import param_groups
from grass.in_backward import step_in_backward
from grass.muon import GrassMuon
from grass.offload.options import Offload
from grass.optimizer import GrassAdamW
from grass.options import PAPER
from grass.selection import Selection, available_rules, register_rule, sampled, select_rows
from grass.selection.projector import Projector
from grass.streaming.stream import Stream, stream
from grass.targets import matched_modules

if TYPE_CHECKING:
    from grass import distributed, sweep

__version__ = "0.1.0"

__all__ = [
    "PAPER",
    "Attachment",
    "AveragedModel",
    "GrassAdamW",
    "GrassMuon",
    "Offload",
    "Projector",
    "Selection",
    "Stream",
    "attach",
    "available_rules",
    "calibrate",
    "compact",
    "diagnostics",
    "distributed",
    "expand",
    "expert_linear",
    "int8",
    "load_columns",
    "matched_modules",
    "memory",
    "param_groups",
    "register_linear",
    "register_rule",
    "sampled",
    "save_columns",
    "select_rows",
    "step_in_backward",
    "stream",
    "sweep",
]


def __getattr__(name: str) -> ModuleType:
    """Import ``grass.distributed``, ``grass.int8`` and ``grass.sweep`` when they are first used."""
    if name in ("distributed", "int8", "sweep"):
        return importlib.import_module(f"grass.{name}")
    raise AttributeError(f"module 'grass' has no attribute {name!r}")
