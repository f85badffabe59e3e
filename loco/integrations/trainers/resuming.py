"""`Trainer.train(resume_from_checkpoint=True)` finds the newest checkpoint that all sites have.

transformers looks in this site's folder alone, and a site may have been stopped before it had saved.
"""

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import transformers.trainer

import loco

from . import rank_file

_trainer: Any = transformers.trainer
_finders: dict[str, Callable[[str], str | None]] = {}  # by the folder that they look in


def find_checkpoints_by(find: Callable[[str], str | None], folder: str) -> None:
    """Have `find(folder)` asked for the newest checkpoint there."""
    _finders[folder] = find
    _ask_finders()


@cache
def _ask_finders() -> None:
    theirs = _trainer.get_last_checkpoint

    @wraps(theirs)
    def last(folder: str) -> str | None:
        find = _finders.get(folder)
        return theirs(folder) if find is None else find(folder)

    _trainer.get_last_checkpoint = last


def newest_of_all(topology: loco.SiteTopology, folder: str) -> str | None:
    """Of the checkpoints of this rank, the newest that all ranks have; None if no rank has any.

    Raises:
        ValueError: on all ranks: there is none that all have.
    """
    mine = [path for path in Path(folder).glob("checkpoint-*") if _is_whole(path, topology)]
    steps = {_step(path): str(path) for path in mine}
    rendezvous = topology.rendezvous
    told = rendezvous.exchange_notes({"checkpoints": sorted(steps)}, "looking for the newest checkpoint")
    common = set.intersection(*(set(note["checkpoints"]) for note in told))
    if common:
        return steps[max(common)]
    if any(note["checkpoints"] for note in told):
        each = "; ".join(f"{rendezvous.called(k)} has {_listed(note)}" for k, note in enumerate(told))
        raise ValueError(f"there is no checkpoint that all have, from which all could resume: {each}")
    return None


def _is_whole(path: Path, topology: loco.SiteTopology) -> bool:
    """The file of the rounds is written last."""
    return path.name.removeprefix("checkpoint-").isdigit() and rank_file.path_of(topology, path).exists()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def _listed(note: dict[str, list[int]]) -> str:
    return "those of step " + ", ".join(map(str, note["checkpoints"])) if note["checkpoints"] else "none"
