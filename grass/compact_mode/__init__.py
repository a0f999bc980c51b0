"""Compact mode: layers whose active rows are ordinary parameters.

The folder is not called ``compact`` because ``grass.compact`` is a function.
"""
