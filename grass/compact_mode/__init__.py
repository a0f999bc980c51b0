"""Compact mode: linear layers that train a few rows of their weight, as an ordinary parameter.

The folder is not called ``compact`` because ``grass.compact`` is a function.
"""
