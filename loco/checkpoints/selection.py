"""Which checkpoint to load: the newest one of which every rank can see the files that it needs.

All ranks exchange what they see, and then compute the same answer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..coordination.rendezvous import Agreement, swap_or_fail
from ..errors import CheckpointError
from ..round.state import check_same
from .directory import CheckpointDirectory
from .manifest import Position
from .protocol import Saveable
from .resize import Roster

_log = logging.getLogger(__name__)


@dataclass
class Save:
    """One save, as all ranks together see it."""

    position: Position
    num_sites: int
    ranks_per_site: int
    visible_to: dict[int, list[int]] = field(default_factory=dict)  # by old rank: ranks that see its folder


def all_saves(
    rendezvous: Agreement,
    directory: CheckpointDirectory,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
    label: str,
) -> tuple[dict[str, Save], bool]:
    """Every save that some rank sees, by its name; and whether a rank has a damaged one.

    Raises:
        ValueError: the ranks were called with different `sites` or `lost`.
        CheckpointError, TransportError: as `Checkpoints.load`.
    """
    note: dict[str, Any] = {"arguments": [None if sites is None else list(sites), sorted(lost)]}
    failure: Exception | None = None
    try:
        whole = directory.whole(of_all_ranks=True)
        own = [m for m in whole if m.rank == directory.rank]
        note["saves"] = [[*m.position, m.save, m.num_sites, m.ranks_per_site, m.rank] for m in whole]
        note["damaged"] = len(own) < len(directory.positions(own=True))
    except (OSError, CheckpointError) as error:
        failure = error
    notes = swap_or_fail(rendezvous, note, failure, f"looking for checkpoints{label}")
    saves: dict[str, Save] = {}
    for rank, other in enumerate(notes):
        if other["arguments"] != notes[0]["arguments"]:
            raise ValueError(
                f"load() needs the same arguments on all ranks: rank 0 has sites, lost = "
                f"{notes[0]['arguments']}, rank {rank} has {other['arguments']}"
            )
        for round, step, name, num_sites, ranks_per_site, old_rank in other["saves"]:
            save = saves.setdefault(name, Save(Position(round, step), num_sites, ranks_per_site))
            save.visible_to.setdefault(old_rank, []).append(rank)
    return saves, any(other["damaged"] for other in notes)


def newest(
    saves: dict[str, Save],
    skipped: set[str],
    directory: CheckpointDirectory,
    optimizer: Saveable,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
) -> tuple[str, Roster] | None:
    """The name of the newest save that can be loaded, and which rank continues which; None if there is none.

    Raises:
        ValueError, CheckpointError: as `Checkpoints.load`.
    """
    ranks_per_site = optimizer.topology.ranks_per_site
    num_sites = directory.world // ranks_per_site
    invisible: tuple[Position, int] | None = None  # the newest save's leaving rank that nobody can read
    for name, save in sorted(saves.items(), key=lambda item: (item[1].position, item[0]), reverse=True):
        if name in skipped:
            continue
        check_same("ranks_per_site", save.ranks_per_site, ranks_per_site)
        roster = Roster.of(
            sites, lost, old_sites=save.num_sites, new_sites=num_sites, ranks_per_site=ranks_per_site
        )
        continued = {rank: roster.old_rank(rank) for rank in range(directory.world)}
        if any(
            old is not None and rank not in save.visible_to.get(old, ()) for rank, old in continued.items()
        ):
            continue
        if optimizer.outer_state.residual is None:  # leaving sites withhold nothing
            return name, roster
        missing = [old for old in roster.leaving_ranks() if not roster.readers(old, save.visible_to)]
        if not missing:
            return name, roster
        invisible = invisible or (save.position, missing[0])
    if invisible is not None:
        position, old_rank = invisible
        site = old_rank // ranks_per_site
        raise CheckpointError(
            f"{directory.path(position, old_rank)} is not visible to any rank that could read it, and holds "
            f"what site {site} had not sent when it left: copy it to {directory.folder} of a rank that goes "
            f"on and has the same rank in its site, or give it up with lost=[{site}]"
        )
    return None


def require_fresh_start(saves: dict[str, Save], damaged: bool, directory: CheckpointDirectory) -> None:
    """Accept that no checkpoint can be loaded only if none was ever complete on all ranks.

    Raises:
        CheckpointError: there may have been one.
    """
    if not damaged and len(saves) <= 1:
        for save in saves.values():
            _log.warning(
                "the first checkpoint, of %s, was never completed: starting from scratch", save.position
            )
        return
    found = "; ".join(
        f"{save.position} of {', '.join(f'rank {old_rank}' for old_rank in sorted(save.visible_to))}"
        for save in saves.values()
    )
    raise CheckpointError(
        f"{directory.folder} holds checkpoints, but none that is whole on all ranks (found "
        f"{found or 'damaged ones'}): give every rank the folder that it saved to, or empty the folder on "
        f"all ranks to start from scratch"
    )
