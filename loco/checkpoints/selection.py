"""Which checkpoint to take up: the newest of which every rank sees what it needs. All ranks choose alike."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..coordination.rendezvous import Agreement, swap_or_fail
from ..errors import CheckpointError
from ..optimizer import LowCommunicationOptimizer
from ..round.state import check_same
from .directory import CheckpointDirectory
from .manifest import Position
from .resize import Roster

_log = logging.getLogger(__name__)


@dataclass
class Save:
    """What all ranks together can see of one save."""

    position: Position
    num_sites: int
    ranks_per_site: int
    seen: dict[int, list[int]] = field(default_factory=dict)  # by old rank: new ranks that see its folder


def all_saves(
    notes: Agreement,
    directory: CheckpointDirectory,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
    name: str,
) -> tuple[dict[str, Save], bool]:
    """-> what all ranks can see together, by the save's name; whether anything was damaged."""
    mine: dict[str, Any] = {"call": [None if sites is None else list(sites), sorted(lost)]}
    failure: Exception | None = None
    try:
        whole = directory.whole(of_all=True)
        mine["saves"] = [[*m.position, m.save, m.num_sites, m.ranks_per_site, m.rank] for m in whole]
        mine["damaged"] = len([m for m in whole if m.rank == directory.rank]) < len(
            directory.positions(own=True)
        )
    except (OSError, CheckpointError) as error:
        failure = error
    told = swap_or_fail(notes, mine, failure, f"looking for checkpoints{name}")
    for rank, note in enumerate(told):
        if note["call"] != told[0]["call"]:
            raise ValueError(
                f"load() must be called alike on all ranks: rank 0 says sites, lost = {told[0]['call']}, "
                f"rank {rank} {note['call']}"
            )
    saves: dict[str, Save] = {}
    for rank, note in enumerate(told):
        for round, step, name, num_sites, each, old in note["saves"]:
            save = saves.setdefault(name, Save(Position(round, step), num_sites, each))
            save.seen.setdefault(old, []).append(rank)
    return saves, any(note["damaged"] for note in told)


def newest(
    saves: dict[str, Save],
    passed_over: set[str],
    directory: CheckpointDirectory,
    optimizer: LowCommunicationOptimizer,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
) -> tuple[str, Roster] | None:
    """Its name, and who continues whom; None if there is none.

    Raises:
        ValueError, CheckpointError: as `Checkpoints.load`.
    """
    each, unseen = optimizer.topology.ranks_per_site, None
    withholds = optimizer._outer.residual is not None
    for name, save in sorted(saves.items(), key=lambda item: (item[1].position, item[0]), reverse=True):
        if name in passed_over:
            continue
        check_same("ranks_per_site", save.ranks_per_site, each)
        roster = Roster.of(sites, lost, old=save.num_sites, new=directory.world // each, each=each)
        needed = {r: roster.old_rank(r) for r in range(directory.world)}
        if any(old is not None and r not in save.seen.get(old, []) for r, old in needed.items()):
            continue
        missing = [
            site * each + place
            for site in roster.leaving
            for place in range(each)
            if withholds and not any(r % each == place for r in save.seen.get(site * each + place, []))
        ]
        if not missing:
            return name, roster
        unseen = unseen or (save.position, missing[0])
    if unseen is not None:
        position, rank = unseen
        raise CheckpointError(
            f"{directory.path(position, rank)} can't be seen from any rank of its place, and holds what "
            f"site {rank // each} had not sent when it left: copy it to {directory.folder} of a rank "
            f"that goes on, or give it up with lost=[{rank // each}]"
        )
    return None


def require_fresh_start(saves: dict[str, Save], damaged: bool, directory: CheckpointDirectory) -> None:
    """No checkpoint that all ranks hold: fine where none was ever finished, and only there."""
    if not damaged and len(saves) <= 1:
        for save in saves.values():
            _log.warning("the first checkpoint, of %s, was not finished: starting anew", save.position)
        return
    found = "; ".join(
        f"{save.position} of {', '.join(f'rank {old}' for old in sorted(save.seen))}"
        for save in saves.values()
    )
    raise CheckpointError(
        f"{directory.folder} holds checkpoints, but none whole on all ranks (found "
        f"{found or 'damaged ones'}): give every rank the folder that it saved to, "
        f"or empty it on all to start anew"
    )
