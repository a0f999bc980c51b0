"""Finetuning tasks: classification and instructions."""
