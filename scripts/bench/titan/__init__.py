"""torchtitan with a tiny model on CPUs, for tests and scripts."""
