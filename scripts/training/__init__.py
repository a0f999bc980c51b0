"""A small, restartable pretraining loop around any torch optimizer."""
