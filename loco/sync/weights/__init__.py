"""Weights in memory, at the publisher and at the subscriber: tensors, regions of them, and their bits."""
