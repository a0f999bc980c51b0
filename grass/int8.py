"""Converted layers whose frozen weight has 8 bits: the public name of :mod:`grass.compact_mode.int8`."""

from grass.compact_mode.int8 import plain_state_dict

__all__ = ["plain_state_dict"]
