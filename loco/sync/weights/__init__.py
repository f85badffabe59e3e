"""The weights at either end: a model's tensors, the memory they lie in, and who publishes which part."""
