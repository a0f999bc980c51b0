"""Optimizer state in host memory: tasks, the threads that run them, the link to the device, a model of time."""
