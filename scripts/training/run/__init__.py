"""A pretraining run: model, optimizer, loop, checkpoints, metrics."""
