"""The commands of `python -m loco`, a file for each."""
