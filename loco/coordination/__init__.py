"""What the ranks agree on without links, by the store: who is alive, who has come, whether a round counts."""
