"""From a command to its ranks: starting them, their logs, progress, and no process left behind."""
