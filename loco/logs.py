"""Warnings that concern all ranks, said once on each machine."""

import logging
import os


def warn_once_per_machine(logger: logging.Logger, message: str, *args: object) -> None:
    """Log what every rank logs: as a warning on the first rank of this machine, as information on the others.

    torchrun and other launchers number a machine's ranks in LOCAL_RANK. A process without it is alone.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    logger.log(logging.WARNING if first else logging.INFO, message, *args)
