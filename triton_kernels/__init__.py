"""Grass's inner loops: Triton kernels on CUDA, torch twins of the same signature elsewhere (:mod:`dispatch`)."""

from .compact_adamw import compact_adamw_
from .compact_adamw_8bit import compact_adamw_8bit_
from .move_factors import move_factors
from .move_rows import move_rows_
from .random_bits import make_key, random_bits, round_stochastically
from .reload_rows import reload_rows_
from .row_norms import row_norms
from .row_sketch import row_sketch
from .scatter_add_rows import scatter_add_cols, scatter_add_rows
from .shrink import shrink_

__all__ = [
    "compact_adamw_",
    "compact_adamw_8bit_",
    "make_key",
    "move_factors",
    "move_rows_",
    "random_bits",
    "reload_rows_",
    "round_stochastically",
    "row_norms",
    "row_sketch",
    "scatter_add_cols",
    "scatter_add_rows",
    "shrink_",
]
