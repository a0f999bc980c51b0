"""Weights and activations on a grid of ranks: two-dimensional tensor parallelism."""

from grass.distributed.parallel_2d.model import parallelize_2d

__all__ = ["parallelize_2d"]
