"""Agreement of ranks through the store, without links: who is alive, who is here, which rounds count."""
