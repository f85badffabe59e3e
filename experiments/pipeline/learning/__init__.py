"""The side of a pipeline that learns: trainers, their losses, and the versions that they publish."""
