"""Sites as processes, in a network of their own, for the benchmarks."""
