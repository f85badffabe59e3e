"""Where a checkpoint's elements lie in an inference engine's parameters, and how its ranks change them."""
