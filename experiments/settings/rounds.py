"""What loco's optimizers are told of a run's rounds."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from experiments.settings.config import DECIDED, RunConfig, told

C = TypeVar("C", bound=RunConfig)  # a program's own kind


def resolved(config: C) -> C:
    """With what loco decides as numbers, for the record; but with `saving` as that one number."""
    return config if config.saving is not None else dataclasses.replace(config, **told(config))


def outer_options(config: RunConfig) -> dict[str, Any]:
    """The arguments of loco.PulseLoCo, or of loco.DiLoCo, that say what a round is."""
    names = ["sync_every", "nesterov", "outer_lr", "outer_momentum"]
    if config.method != "diloco":
        names += ["gate", *DECIDED]
    options = {name: getattr(config, name) for name in names}
    is_late = config.overlap is not None
    options["overlap"] = is_late if not is_late or "finds_outer_lr" in told(config) else config.overlap
    return options
