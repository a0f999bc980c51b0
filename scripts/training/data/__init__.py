"""Text and token blocks for training."""
