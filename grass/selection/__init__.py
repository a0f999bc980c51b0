"""Which rows train: selection rules, random draws and the projection onto the chosen rows."""

from grass.selection.rules import Selection, available_rules, register_rule, sampled, select_rows

__all__ = ["Selection", "available_rules", "register_rule", "sampled", "select_rows"]
