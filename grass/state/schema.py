"""The state of one parameter: its keys, named once.

The shapes below are those of a weight ``(m, n)`` with ``r`` selected rows and ``dim=0``. With ``dim=1``, ``(r, n)``
reads ``(m, r)``, and the bank has columns. At full rank a parameter has ``step`` (a float32 tensor), ``exp_avg`` and
``exp_avg_sq`` in its own shape and dtype, as ``torch.optim.AdamW`` does. If it is small and in half precision, it has
them in float32, and a ``master`` (:mod:`grass.state.master`). 8-bit moments have codes, uint8, in place of values; the
second moment is then stored as its square root (:mod:`grass.state.precision`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

State = dict[str, Any]
"""The state of one parameter, as torch holds it: ``optimizer.state[parameter]``."""


class Key(NamedTuple):
    """What is stored under one key of a state.

    Attributes:
        meaning: in a few words.
        shape: of the tensor; empty for a plain number.
        dtype: of the tensor or number.
        on_host: whether it stays in host memory, wherever the weight is.
        sharded: whether it is divided over the ranks as the weight is; everything else is the same on all ranks.
    """

    meaning: str
    shape: str
    dtype: str
    on_host: bool = False
    sharded: bool = False


KEYS = {
    "step": Key("steps of this weight", "", "int"),
    "refresh_step": Key("`step` at the last refresh", "", "int"),
    "refreshes": Key("selections so far that gradient norms decided", "", "int"),
    "indices": Key("the selected rows", "(r,)", "int64"),
    "dim": Key("0 for rows, 1 for columns", "", "int"),
    "explored": Key("how many rows are explored; only of converted layers", "", "int"),
    "row_scale": Key("scale of each selected row, `rho`; only with replacement=True", "(r,)", "float32"),
    "row_steps": Key("Adam steps of each selected row; not with state_policy='reset'", "(r,)", "float32"),
    "exp_avg": Key("first moment", "(r, n)", "moment_dtype", sharded=True),
    "exp_avg_sq": Key("second moment", "(r, n)", "moment_dtype", sharded=True),
    "exp_avg_scale": Key("scales of 8-bit codes, one for 256 values", "(ceil(r n / 256),)", "float32"),
    "exp_avg_sq_scale": Key("the same for the second moment", "(ceil(r n / 256),)", "float32"),
    "bank_exp_avg": Key("first moments of the rows not selected", "(m, n)", "bank_dtype", on_host=True, sharded=True),
    "bank_exp_avg_sq": Key("their second moments", "(m, n)", "bank_dtype", on_host=True, sharded=True),
    "bank_steps": Key("their Adam steps", "(m,)", "float32", on_host=True),
    "master": Key("float32 master of a half-precision parameter, if small or if asked for", "(m, n)", "float32"),
    "chosen": Key("the rows of a layer that waits for its first step, selected before explored", "(r + q,)", "int64"),
    "active": Key("active rows that are more precise than the weight; filled by state_dict()", "(r, n)", "float32"),
}

MOMENTS = ("exp_avg", "exp_avg_sq")
BANKED_MOMENTS = ("bank_exp_avg", "bank_exp_avg_sq")
HOST_KEYS = frozenset(name for name, key in KEYS.items() if key.on_host)
SHARDED_KEYS = frozenset(name for name, key in KEYS.items() if key.sharded)


def shared_steps(state: State) -> int:
    """Adam steps since the last refresh: the step count of every row under ``state_policy="reset"``."""
    steps: int = state["step"] - state["refresh_step"]
    return steps
