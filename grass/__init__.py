"""Grass for PyTorch: an AdamW that computes, keeps and updates only selected rows of each gradient."""

__version__ = "0.1.0"
