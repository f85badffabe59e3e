"""How all ranks find a checkpoint, read it and load it, together or not at all.

Each rank tells all others what it sees. Which checkpoint is loaded, by which rank, follows from that alone.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..errors import CheckpointError, ReplicaError
from ..logs import warn_once_per_machine
from ..members.view import Agreement
from ..round.outer.state import digest_of, identity
from . import formats
from .directory import CheckpointDirectory
from .plain_data import from_plain_data
from .protocol import Saveable
from .rank_manifest import Position, read_manifest
from .resize import Roster, hand_over, send_to_joining, update_of

_log = logging.getLogger(__name__)
_Done = TypeVar("_Done")


def exchange_or_fail(
    rendezvous: Agreement,
    note: dict[str, Any],
    failure: Exception | None,
    phase: str,
) -> list[dict[str, Any]]:
    """Every rank's note, if none of them failed before.

    Raises:
        Exception: `failure`, this rank's own.
        CheckpointError: another rank's, or a disk's.
        TransportError, NeededError, CheckpointError: as `Rendezvous.swap`.
    """
    note["failure"] = None if failure is None else str(failure) or type(failure).__name__
    told = rendezvous.exchange_notes(note, phase)
    if isinstance(failure, OSError):
        raise CheckpointError(f"{phase}: {failure}") from failure
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if theirs["failure"] is not None:
            raise CheckpointError(f"{phase}: {rendezvous.called(rank)} failed: {theirs['failure']}")
    return told


def together(
    rendezvous: Agreement,
    phase: str,
    do: Callable[[dict[str, Any]], _Done],
) -> tuple[_Done, list[dict[str, Any]]]:
    """Call `do(note)`, which fills in what this rank tells the others -> its result, and every rank's note.
    If it fails on one rank, all raise an error, as `exchange_or_fail` does."""
    note: dict[str, Any] = {}
    try:
        done = do(note)
    except Exception as error:
        exchange_or_fail(rendezvous, note, error, phase)
        raise
    return done, exchange_or_fail(rendezvous, note, None, phase)


def read_together(
    rendezvous: Agreement, position: Position, read: Callable[[dict[str, Any]], _Done]
) -> tuple[_Done, bool]:
    """Call `read(note)`, which notes what is damaged -> its result, and whether every rank's files are whole.
    A warning names those that are not."""
    files, notes = together(rendezvous, f"reading {position}", read)
    reasons = [note["damaged"] for note in notes if note["damaged"]]
    if reasons:
        warn_once_per_machine(_log, "skipping the checkpoint of %s: %s", position, "; ".join(reasons))
    return files, not reasons


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `Checkpoints.load` has loaded.

    Attributes:
        round: rounds done.
        local_step: inner steps since.
        extra: as it was given to `Checkpoints.save`.
    """

    round: int
    local_step: int
    extra: Any


@dataclass
class Save:
    """One save, as all ranks together see it."""

    name: str
    position: Position
    num_sites: int
    refusal: str = ""  # why it is not of this training
    visible: set[tuple[int, int]] = field(default_factory=set)  # (rank, the old rank whose folder it sees)


class Selected(NamedTuple):
    """The save to load, and by old rank of a leaving site the rank that reads its folder."""

    save: Save
    roster: Roster
    readers: dict[int, int]


@dataclass(frozen=True)
class Load:
    """A call of `Checkpoints.load`: see there."""

    optimizer: Saveable
    directory: CheckpointDirectory
    sites: Sequence[int | None] | None
    lost: Sequence[int]

    def run(self, label: str) -> tuple[Resumed | None, set[str]]:
        """-> what was loaded, and the names of all saves that are of this training."""
        rendezvous = self.optimizer.topology.rendezvous
        _, notes = together(rendezvous, f"looking for checkpoints{label}", self._look)
        for rank, note in enumerate(notes):
            if note["arguments"] != notes[0]["arguments"]:
                raise ValueError(
                    f"load() needs the same arguments on all ranks: {rendezvous.called(0)} has sites, lost = "
                    f"{notes[0]['arguments']}, {rendezvous.called(rank)} has {note['arguments']}"
                )
        saves, damaged = _all_saves(notes, rendezvous), any(note["damaged"] for note in notes)
        names = {save.name for save in saves}
        while selected := self._newest(saves):
            position = selected.save.position
            files, is_whole = read_together(rendezvous, position, partial(self._read, selected))
            if is_whole:
                return self._load(selected, *files), names
            saves.remove(selected.save)
            damaged = True
        self._require_fresh_start(saves, damaged)
        return None, names

    def _look(self, note: dict[str, Any]) -> None:
        whole, damaged = self.directory.whole(of_all_ranks=True)
        note["arguments"] = [None if self.sites is None else list(self.sites), sorted(self.lost)]
        note["saves"] = [[m.save, *m.position, m.num_sites, m.rank, m.refusal(self.optimizer)] for m in whole]
        note["damaged"] = damaged

    def _newest(self, saves: list[Save]) -> Selected | None:
        """The newest save of which every rank can see the files that it needs."""
        each, world = self.optimizer.topology.ranks_per_site, self.directory.world
        withholds = self.optimizer.outer_state.residual is not None
        invisible: tuple[Position, int] | None = None  # the newest save's leaving rank that nobody can read
        for save in saves:
            if save.refusal:
                raise ValueError(save.refusal)
            roster = Roster.of(
                self.sites, self.lost, old_sites=save.num_sites, new_sites=world // each, ranks_per_site=each
            )
            old_ranks = [(rank, roster.old_rank(rank)) for rank in range(world)]
            if any(old is not None and (rank, old) not in save.visible for rank, old in old_ranks):
                continue
            if not withholds and roster.leaving and save.position.local_step:
                raise ValueError(
                    f"{save.position} lies inside a round, and without a gate there is no residual that "
                    f"could hold what a leaving site has done in it: resume with as many sites, or from the "
                    f"end of a round"
                )
            readers = {  # ranks that hold the same slice of θ
                old: [rank for rank in range(old % each, world, each) if (rank, old) in save.visible]
                for site in (roster.leaving if withholds else ())
                for old in range(site * each, (site + 1) * each)
            }
            unread = [old for old, ranks in readers.items() if not ranks]
            if not unread:
                return Selected(save, roster, {old: ranks[0] for old, ranks in readers.items()})
            invisible = invisible or (save.position, unread[0])
        if invisible is None:
            return None
        site = invisible[1] // each
        raise CheckpointError(
            f"{self.directory.path(*invisible)} is not visible to any rank that could read it, and holds "
            f"what site {site} had not sent when it left: copy it to {self.directory.folder} of a rank that "
            f"goes on and has the same rank in its site, or give it up with lost=[{site}]"
        )

    def _require_fresh_start(self, saves: list[Save], damaged: bool) -> None:
        """Accept that no checkpoint can be loaded only if none was ever complete on all ranks."""
        if damaged or len(saves) > 1:
            found = []
            for save in saves:
                old_ranks = sorted({old for _, old in save.visible})
                found.append(f"{save.position} of rank {', rank '.join(map(str, old_ranks))}")
            raise CheckpointError(
                f"{self.directory.folder} holds checkpoints, but none that is whole on all ranks (found "
                f"{'; '.join(found) or 'damaged ones'}): give every rank the folder that it saved to, or "
                f"empty the folder on all ranks to start from scratch"
            )
        for save in saves:
            warn_once_per_machine(
                _log, "the first checkpoint, of %s, was never completed: starting from scratch", save.position
            )

    def _read(self, selected: Selected, note: dict[str, Any]) -> tuple[Any, dict[int, Tensor]]:
        """What the rank that this one continues has saved (None: this one joins), and by old rank what the
        leaving ranks that this one reads had not sent. Changes nothing; `note` says what is damaged."""
        tree, updates, note["damaged"] = None, {}, ""
        try:
            old_rank = selected.roster.old_rank(self.directory.rank)
            if old_rank is not None:
                tree = read_folder(self.directory.path(selected.save.position, old_rank))
                self._require_same_sites_in_flight(selected, tree["optimizer"]["loco"])
            for old, reader in selected.readers.items():
                if reader == self.directory.rank:
                    leaving = read_folder(self.directory.path(selected.save.position, old))
                    updates[old] = update_of(self.optimizer.outer_state, leaving)
        except CheckpointError as error:
            note["damaged"] = str(error)
        return tree, updates

    def _require_same_sites_in_flight(self, selected: Selected, own: dict[str, Any]) -> None:
        save, roster = selected.save, selected.roster
        if own.get("ahead") is None or (save.num_sites == len(roster.sites) and not roster.joining):
            return
        raise in_flight(save.position)

    def _load(self, selected: Selected, tree: Any, updates: dict[int, Tensor]) -> Resumed:
        """Every rank has read its files and found them whole."""
        exchange = partial(self._exchange, selected, tree, updates)
        return load_together(self.optimizer, selected.save.position, exchange)

    def _exchange(self, selected: Selected, tree: Any, updates: dict[int, Tensor]) -> Any:
        """What this rank is to load: its files, after the messages from and to sites that join or leave."""
        topology, outer = self.optimizer.topology, self.optimizer.outer_state
        all_ranks, each, roster = topology.all_ranks(), topology.ranks_per_site, selected.roster
        if roster.joining:
            tree = send_to_joining(all_ranks, roster, tree, outer)
        own = tree["optimizer"]["loco"]
        for old, reader in selected.readers.items():
            site, rank_in_site = divmod(old, each)
            if rank_in_site != topology.rank_in_site:
                continue
            ranks = [reader, *(heir * each + rank_in_site for heir in roster.heirs(site))]
            phase = f"what site {site} left"
            if rounded := hand_over(all_ranks, ranks, updates.get(old), own["residual"], phase):
                _log.warning("%d elements of %s fit no residual exactly and were rounded", rounded, phase)
        own |= identity(topology, outer.parameters)
        return tree


def load_together(optimizer: Saveable, position: Position, make: Callable[[], Any]) -> Resumed:
    """All ranks load what `make` makes for each of them, or none does."""
    note: dict[str, Any] = {}  # equal on all ranks that hold the same part of θ
    is_asked = is_agreed = False
    tree: Any = None

    def agree(failure: Exception | None = None) -> None:
        nonlocal is_asked, is_agreed
        is_asked = True
        notes = exchange_or_fail(optimizer.topology.rendezvous, note, failure, f"loading {position}")
        each = optimizer.topology.ranks_per_site
        for rank, other in enumerate(notes):
            expected = notes[rank % each]
            if other != expected:
                here, there = map(optimizer.topology.rendezvous.called, (rank % each, rank))
                raise ReplicaError(f"the files of {there} hold {other}, those of {here} {expected}")
        is_agreed = True

    failure = None
    try:
        tree = from_plain_data(make(), optimizer.outer_state.parameters.params)
        own = tree["optimizer"]["loco"]
        note["position"] = list(Position.of(own))
        note["digest"] = digest_of(own["anchor"])
        if own.get("step_length") is not None:
            note["outer step"] = own["step_length"] | {"before": None}
        optimizer.load_state_dict(tree["optimizer"], agree=agree)
    except Exception as error:
        if not is_asked:
            agree(error)  # the other ranks must not load either
        if not is_agreed:
            raise
        failure = error
    exchange_or_fail(optimizer.topology.rendezvous, {}, failure, f"completing the load of {position}")
    _log.info("resumed at %s", position)
    return Resumed(round=optimizer.round, local_step=optimizer.local_step, extra=tree["extra"])


def _all_saves(notes: list[dict[str, Any]], rendezvous: Agreement) -> list[Save]:
    """Every save that some rank sees, newest first."""
    saves: dict[str, Save] = {}
    for rank, note in enumerate(notes):
        for name, round, step, num_sites, old_rank, refusal in note["saves"]:
            save = saves.setdefault(name, Save(name, Position(round, step), num_sites))
            save.visible.add((rank, old_rank))
            if refusal and not save.refusal:
                save.refusal = f"{rendezvous.called(rank)}: {refusal}"
    return sorted(saves.values(), key=lambda save: (save.position, save.name), reverse=True)


def read_folder(folder: Path) -> dict[str, Any]:
    """What a rank saved. A CheckpointError if that is not what lies there."""
    try:
        manifest = read_manifest(folder)
        manifest.check_whole(folder)
        tree = _read(manifest.format, partial(manifest.open, folder))
        formats.check_tree(tree)
        own = tree["optimizer"]["loco"]
        if digest_of(own["anchor"]) != manifest.digest:
            raise ValueError("its anchor is not the one that was saved")
        if Position.of(own) != manifest.position:
            raise ValueError(f"its data are not of {manifest.position}")
    except Exception as error:  # reading what was not written may raise anything
        raise CheckpointError(f"{folder} is damaged ({type(error).__name__}: {error})") from error
    return tree


def _read(format: str, open: formats.Open) -> Any:
    if format == "torch":
        return formats.read(open)
    if format == "dcp":
        from . import dcp_format  # which takes half a second

        return dcp_format.read(open)
    raise ValueError(f"its format is {format!r:.100}, which this version of loco does not read")


def in_flight(position: Position) -> ValueError:
    return ValueError(
        f"{position} was saved with a round in flight, which all ranks that sent it have to bring to its "
        f"end: resume with the same sites and shards, or call sync() before the save that others resume from"
    )
