"""Processes, shards and threads."""
