"""Versions: their layouts, manifests and files, and which files lead to one."""
