"""The heartbeat thread, and the C thread that replaces it while Python's interpreter lock is held."""
