"""What is learned: the seam `task.py`, and the tasks behind it."""
