"""The training loop of all methods, and what is measured and kept of a run."""
