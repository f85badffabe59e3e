"""Rounds that travel beside the inner steps of the next one."""
