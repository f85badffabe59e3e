"""How all ranks read the chosen checkpoint, and take it up, together or not at all."""

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..coordination.rendezvous import swap_or_fail
from ..errors import CheckpointError, ReplicaError
from ..optimizer import LowCommunicationOptimizer
from ..round.loop import OuterLoop
from ..round.state import digest_of, identity
from .directory import CheckpointDirectory
from .formats import FORMATS
from .manifest import Manifest, Position, read_manifest
from .resize import Roster, hand_over, send_to_joining, update_of
from .selection import Save, all_saves, newest, require_fresh_start

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Read:
    """What this rank has read of a checkpoint."""

    tree: dict[str, Any] | None = None  # of the rank that it continues; None: it joins
    readers: dict[int, int] = field(default_factory=dict)  # by leaving site: who reads what it left
    updates: dict[int, Tensor] = field(default_factory=dict)  # what this rank has read of that


def resume(
    optimizer: LowCommunicationOptimizer,
    directory: CheckpointDirectory,
    sites: Sequence[int | None] | None,
    lost: Sequence[int],
    name: str,
) -> Any:
    """See `Checkpoints.load`; `name` tells apart several folders of one training."""
    notes = optimizer.topology.notes
    saves, damaged = all_saves(notes, directory, sites, lost, name)
    passed_over: set[str] = set()
    while chosen := newest(saves, passed_over, directory, optimizer, sites, lost):
        save, roster = chosen
        read = _Read()
        try:
            _read_all(read, directory, saves[save], roster, optimizer._outer)
            verdict, text = "whole", ""
        except _DamagedError as error:
            verdict, text = "damaged", str(error)
        except Exception as error:
            verdict = "foreign" if isinstance(error, ValueError) else "failed"
            text = str(error) or type(error).__name__
        at = saves[save].position
        verdicts = notes.swap({"verdict": verdict, "text": text}, f"reading {at}")
        for rank, theirs in enumerate(verdicts):
            if theirs["verdict"] == "foreign":
                raise ValueError(f"rank {rank}: {theirs['text']}")
            if theirs["verdict"] == "failed":
                raise CheckpointError(f"rank {rank}: {theirs['text']}")
        bad = [theirs["text"] for theirs in verdicts if theirs["verdict"] == "damaged"]
        if not bad:
            return _take_up(optimizer, roster, read, at)
        _log.warning("the checkpoint of %s is passed over: %s", at, "; ".join(bad))
        passed_over.add(save)
    return require_fresh_start(saves, damaged or bool(passed_over), directory)


def _read_all(
    read: _Read, directory: CheckpointDirectory, save: Save, roster: Roster, outer: OuterLoop
) -> None:
    """Fill `read`. Nothing is changed, and nothing sent.

    Raises:
        ValueError, _DamagedError: as `_read`.
    """
    each, place = roster.ranks_per_site, outer.topology.rank_in_site
    if roster.leaving and outer.residual is None and save.position.local_step:
        raise ValueError(
            f"{save.position} lies inside a round, and what a leaving site had done in it has no place to "
            f"go: without a gate there is no residual. Go on with as many sites, or from a round's end"
        )
    old = roster.old_rank(directory.rank)
    if old is not None:
        read.tree = _read(directory, save.position, old, outer)
    if outer.residual is None:
        return  # nothing is held back at a round's end, and who leaves leaves nothing
    for site in roster.leaving:
        theirs = site * each + place
        read.readers[site] = min(rank for rank in save.seen[theirs] if rank % each == place)
        if read.readers[site] == directory.rank:
            state = _read(directory, save.position, theirs, outer)["optimizer"]
            read.updates[site] = update_of(outer, state, site)


class _DamagedError(Exception):
    """A rank's folder is not what was written."""


def _read(directory: CheckpointDirectory, position: Position, rank: int, outer: OuterLoop) -> dict[str, Any]:
    """What a rank saved, proven to be that.

    Raises:
        ValueError: it is of another training.
        _DamagedError: it is not what was written; names the path.
    """
    folder = directory.path(position, rank)
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        raise _DamagedError(str(error)) from error
    manifest.check_belongs(outer)
    try:
        manifest.check_whole(folder)
        tree = FORMATS[manifest.format][1](folder)
        own = tree["optimizer"]["loco"]
        _check_tensors(own, manifest, outer)
    except (
        ValueError,
        OSError,
        RuntimeError,
        KeyError,
        TypeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise _DamagedError(f"{folder} is damaged ({type(error).__name__}: {error})") from error
    return tree


def _check_tensors(own: dict[str, Any], manifest: Manifest, outer: OuterLoop) -> None:
    """The data are those that the manifest speaks of."""
    if Position(own["round"], own["local_step"]) != manifest.position:
        raise ValueError(f"its data are of {Position(own['round'], own['local_step'])}")
    if digest_of(own["anchor"]) != manifest.digest or own["anchor"].shape != outer.anchor.shape:
        raise ValueError("its anchor is another than when it was saved")


def _take_up(
    optimizer: LowCommunicationOptimizer,
    roster: Roster,
    read: _Read,
    position: Position,
) -> Any:
    """Everything has been read and found whole: now the ranks change."""
    outer, everyone = optimizer._outer, optimizer.topology.everyone()
    tree = read.tree
    if roster.joining:
        tree = send_to_joining(everyone, roster, tree, outer)
    assert tree is not None
    state = tree["optimizer"]
    for site, reader in read.readers.items():
        rounded = hand_over(everyone, roster, site, reader, read.updates.get(site), state["loco"]["residual"])
        if rounded:
            _log.warning("%d elements that site %d left fit no residual exactly: rounded", rounded, site)
    state["loco"] |= identity(outer)
    failure: Exception | None = None
    try:
        optimizer.load_state_dict(state)
        if read.tree is None:
            outer.reset_weights()
    except Exception as error:
        failure = error
    # The ranks of one place hold the same slice of θ.
    mine: dict[str, Any] = {
        "rank_in_site": outer.topology.rank_in_site,
        "round": outer.rounds_done,
        "local_step": optimizer.local_step,
    }
    mine["digest"] = digest_of(outer.anchor)
    notes = swap_or_fail(optimizer.topology.notes, mine, failure, f"taking up {position}")
    for rank, note in enumerate(notes):
        if note != notes[rank % roster.ranks_per_site]:
            raise ReplicaError(f"what rank {rank} has loaded is not what site 0 has: {note} and {notes[0]}")
    _log.info("resumed at %s", position)
    return tree["extra"]
