"""What can be set: configurations, how they are merged, and which runs a comparison is made of."""
