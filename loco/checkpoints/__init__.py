"""Saving and resuming: each checkpoint is there whole, or not at all."""
