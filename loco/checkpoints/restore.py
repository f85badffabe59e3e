"""How all ranks read the selected checkpoint and load it, together or not at all."""

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..coordination.rendezvous import swap_or_fail
from ..errors import CheckpointError, ReplicaError
from ..round.state import digest_of, identity
from .directory import CheckpointDirectory
from .formats import FORMATS
from .manifest import Position, read_manifest
from .protocol import Saveable
from .resize import Roster, hand_over, send_to_joining, update_of
from .selection import Save, newest, require_fresh_start

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class _Files:
    """What this rank has read of a checkpoint."""

    tree: dict[str, Any] | None  # of the rank that this one continues; None: this one joins
    readers: dict[int, int]  # by leaving site: the rank that reads its update
    updates: dict[int, Tensor]  # by leaving site, on the rank that reads it


def resume(
    optimizer: Saveable,
    directory: CheckpointDirectory,
    saves: dict[str, Save],
    damaged: bool,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
) -> Resumed | None:
    """See `Checkpoints.load`. `saves` and `damaged` are what `all_saves` returns."""
    skipped: set[str] = set()
    while selected := newest(saves, skipped, directory, optimizer, sites, lost):
        name, roster = selected
        position, files = saves[name].position, None
        try:
            files = _read_files(directory, saves[name], roster, optimizer)
            verdict, text = "whole", ""
        except _DamagedError as error:
            verdict, text = "damaged", str(error)
        except Exception as error:
            verdict = "foreign" if isinstance(error, ValueError) else "failed"
            text = str(error) or type(error).__name__
        notes = optimizer.topology.notes.swap({"verdict": verdict, "text": text}, f"reading {position}")
        for rank, note in enumerate(notes):
            if note["verdict"] == "foreign":
                raise ValueError(f"rank {rank}: {note['text']}")
            if note["verdict"] == "failed":
                raise CheckpointError(f"rank {rank}: {note['text']}")
        reasons = [note["text"] for note in notes if note["verdict"] == "damaged"]
        if not reasons:
            assert files is not None
            return _load(optimizer, roster, files, position)
        _log.warning("skipping the checkpoint of %s: %s", position, "; ".join(reasons))
        skipped.add(name)
    return require_fresh_start(saves, damaged or bool(skipped), directory)


def _read_files(directory: CheckpointDirectory, save: Save, roster: Roster, optimizer: Saveable) -> _Files:
    """Read what this rank needs. Changes nothing, and sends no messages.

    Raises:
        ValueError, _DamagedError: as `_read_rank`.
    """
    withholds = optimizer.outer_state.residual is not None
    if roster.leaving and not withholds and save.position.local_step:
        raise ValueError(
            f"{save.position} lies inside a round, and without a gate there is no residual that could hold "
            f"what a leaving site has done in it: resume with as many sites, or from the end of a round"
        )
    old_rank = roster.old_rank(directory.rank)
    tree = None if old_rank is None else _read_rank(directory, save.position, old_rank, optimizer)
    readers, updates = {}, {}
    for site in roster.leaving if withholds else ():
        leaving_rank = site * roster.ranks_per_site + directory.rank % roster.ranks_per_site
        readers[site] = min(roster.readers(leaving_rank, save.visible_to))
        if readers[site] == directory.rank:
            state = _read_rank(directory, save.position, leaving_rank, optimizer)["optimizer"]
            updates[site] = update_of(optimizer, state, site)
    return _Files(tree=tree, readers=readers, updates=updates)


class _DamagedError(Exception):
    """A rank's folder is not what was written."""


def _read_rank(
    directory: CheckpointDirectory, position: Position, rank: int, optimizer: Saveable
) -> dict[str, Any]:
    """What a rank saved, proven to be exactly that.

    Raises:
        ValueError: it is of another training.
        _DamagedError: it is not what was written; names the path.
    """
    folder, shape = directory.path(position, rank), optimizer.outer_state.anchor.shape
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        raise _DamagedError(str(error)) from error
    manifest.check_belongs(optimizer)
    try:
        manifest.check_whole(folder)
        tree = FORMATS[manifest.format][1](folder)
        own = tree["optimizer"]["loco"]
        if Position(own["round"], own["local_step"]) != position:
            raise ValueError(f"its data are of {Position(own['round'], own['local_step'])}")
        if digest_of(own["anchor"]) != manifest.digest or own["anchor"].shape != shape:
            raise ValueError("its anchor is not the one that was saved")
    except (
        *(ValueError, OSError, RuntimeError, KeyError, TypeError, EOFError),
        pickle.UnpicklingError,
    ) as error:
        raise _DamagedError(f"{folder} is damaged ({type(error).__name__}: {error})") from error
    return tree


def _load(optimizer: Saveable, roster: Roster, files: _Files, position: Position) -> Resumed:
    """Every rank has read its files and found them whole. Now all ranks load, or none does."""
    rendezvous, ranks_per_site = optimizer.topology.notes, optimizer.topology.ranks_per_site
    note: dict[str, Any] = {}  # equal on all ranks that hold the same slice of θ
    is_asked = is_agreed = False

    def agree(failure: Exception | None = None) -> None:
        nonlocal is_asked, is_agreed
        is_asked = True
        notes = swap_or_fail(rendezvous, note, failure, f"loading {position}")
        for rank, other in enumerate(notes):
            expected = notes[rank % ranks_per_site]
            if other != expected:
                raise ReplicaError(f"the files of rank {rank} hold {other}, those of site 0 {expected}")
        is_agreed = True

    failure, extra = None, None
    try:
        tree = _exchange(optimizer, roster, files)
        state, extra = tree["optimizer"], tree["extra"]
        own = state["loco"]
        note |= {"round": own["round"], "local_step": own["local_step"], "digest": digest_of(own["anchor"])}
        optimizer.load_state_dict(state, agree=agree)
    except Exception as error:
        if not is_asked:
            agree(error)  # the other ranks must not load either
        if not is_agreed:
            raise
        failure = error
    swap_or_fail(rendezvous, {}, failure, f"completing the load of {position}")
    _log.info("resumed at %s", position)
    return Resumed(round=optimizer.round, local_step=optimizer.local_step, extra=extra)


def _exchange(optimizer: Saveable, roster: Roster, files: _Files) -> dict[str, Any]:
    """What this rank is to load: its files, after the messages from and to sites that join or leave."""
    all_ranks, tree = optimizer.topology.everyone(), files.tree
    if roster.joining:
        tree = send_to_joining(all_ranks, roster, tree, optimizer)
    assert tree is not None
    own = tree["optimizer"]["loco"]
    for site, reader in files.readers.items():
        rounded = hand_over(all_ranks, roster, site, reader, files.updates.get(site), own["residual"])
        if rounded:
            _log.warning(
                "%d elements of what site %d left fit no residual exactly and were rounded", rounded, site
            )
    own |= identity(optimizer.topology, optimizer.outer_state.parameters)
    return tree
