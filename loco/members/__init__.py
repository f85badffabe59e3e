"""Who takes part: a fixed world, or sites that come and go."""
