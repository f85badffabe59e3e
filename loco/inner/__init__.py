"""The user's optimizer: wrapped, several as one, and which of its steps are training."""
