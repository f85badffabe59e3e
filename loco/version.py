"""loco's version, as checkpoints record it."""

VERSION = "0.1.0"
