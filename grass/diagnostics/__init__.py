r"""How selection behaves during training: turnover, energy captured and coverage, for any loop.

For a weight with ``m`` selectable rows (``dim=1``: columns), ``sigma`` the rows selected now, ``sigma'`` those selected
before the latest refresh, and ``G_i`` the rows of its gradient:

========  ==========================================================  ==============================================
turnover  ``|sigma \ sigma'| / |sigma|``                              0 before the second selection
energy    ``sum_{i in sigma} ||G_i||^2 / sum_i ||G_i||^2``            its maximum is what ``top_r`` takes
coverage  ``|union of all selections so far| / m``                    since the first :class:`SelectionHistory`
========  ==========================================================  ==============================================

A row drawn twice counts once. ``energy`` needs the norms of all rows:

- Dense mode has them in every step, under every rule: energy is that of the step just made, so it shows how a selection
  ages between two refreshes. With :func:`grass.step_in_backward`, which frees gradients, it is NaN.
- Compact mode has them only at a refresh, and only for a rule that reads norms. Energy is then that of the sketched
  gradient by which the rows were chosen, the same on all ranks, and stays until the next refresh.
- Compact mode under a rule that reads no norms, such as the default ``selection="uniform"``, never has them: **energy
  is NaN**. Turnover and coverage are measured as usual.
"""

from __future__ import annotations

from grass.diagnostics.history import SelectionHistory
from grass.diagnostics.measures import MEASURES, LayerRecord, energy, turnover

__all__ = ["MEASURES", "LayerRecord", "SelectionHistory", "energy", "turnover"]
