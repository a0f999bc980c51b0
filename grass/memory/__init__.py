"""Memory in bytes: what an optimizer holds, measured, and what training would take, planned.

``python -m grass.memory --model 13b --gpu 40GB`` prints the plan.
"""

from grass.memory.architecture import Architecture
from grass.memory.methods import METHODS, Method
from grass.memory.planner import Plan, plan
from grass.memory.setting import Setting
from grass.memory.state import StateBytes, state_bytes
from grass.memory.units import format_bytes, parse_bytes

__all__ = [
    "METHODS",
    "Architecture",
    "Method",
    "Plan",
    "Setting",
    "StateBytes",
    "format_bytes",
    "parse_bytes",
    "plan",
    "state_bytes",
]
