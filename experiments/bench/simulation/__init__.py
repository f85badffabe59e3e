"""Many sites without their processes: what they would send, and how long it would take."""
