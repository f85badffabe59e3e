"""Heartbeats of a rank whose program holds Python's interpreter lock."""
