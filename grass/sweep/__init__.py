"""Many short runs with different settings, in a pool of processes that no fault stops.

:func:`run` runs any training loop that yields its loss. ``python -m grass.sweep`` finds the two learning rates of a
language model with it (:mod:`grass.sweep.__main__`). :func:`for_ray` gives the same loops to Ray Tune.
"""

from grass.sweep.ray_tune import for_ray
from grass.sweep.runner import run
from grass.sweep.stopping import Behind

__all__ = ["Behind", "for_ray", "run"]
