"""Checkpoints of a training, written while it goes on."""

import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..coordination.rendezvous import Agreement, NeededError, swap_or_fail
from ..errors import CheckpointError
from .directory import CheckpointDirectory
from .formats import FORMATS, host_copy
from .manifest import Manifest, Position, manifest_of, site_name
from .protocol import Saveable
from .restore import Resumed, resume
from .selection import all_saves

_log = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoints of a training. Each is there whole or not at all.

        checkpoints = loco.Checkpoints("checkpoints")
        resumed = checkpoints.load(optimizer)               # None: there is no checkpoint yet
        step = resumed.extra["step"] if resumed else 0
        …
        checkpoints.save(optimizer, {"step": step})         # every now and then, on every rank

    Every rank saves a folder of its own, `folder/round-00000012/rank-00003/`: the data, and a `manifest.json`
    that describes them. `folder` may be shared by all ranks, or be a different one on each machine.

    A rank writes to a temporary folder, flushes it to disk and renames it last, so that a crash never leaves
    half a checkpoint. It removes an old checkpoint only when it knows that all ranks hold a newer one: at any
    time there is one that all ranks hold, however many of them die, and whenever.

    Each optimizer needs a `Checkpoints` and a folder of its own; if two share one, the second to save gets a
    CheckpointError. Sites that come and go (`ElasticTopology`) save and load independently of each other,
    each in a folder of its own, `Checkpoints(folder / name)`.

    Args:
        folder: where to save; created if it does not exist.
        keep: how many of the newest checkpoints to keep; at least 2, because one is never replaced before
            the next is complete.
        format: of the data: "torch", one file for `torch.load`; or "dcp", for the tools around
            `torch.distributed.checkpoint`. Checkpoints of either format can be loaded.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, format: str = "torch") -> None:
        if keep < 2:
            raise ValueError(
                f"keep must be >= 2, got {keep}: one stays until all ranks have written the next"
            )
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        self.folder, self.keep, self.format = Path(folder), keep, format
        self._optimizer: weakref.ref[Saveable] | None = None  # the one that was saved or loaded here
        self._own_saves: set[str] = set()  # saves in the folder that are of this training
        self._has_resumed = False  # from a checkpoint that `load` found
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def save(self, optimizer: Saveable, extra: Any = None, *, blocking: bool = False) -> None:
        """Save the whole state of `optimizer`, and `extra`. Call it on every rank at the same step.

        The state is copied to host memory, which takes as much memory as the state, and a thread writes it
        while training goes on; the next `save` waits for that thread. If all ranks have already saved this
        step, that checkpoint stays as it is.

        A round that was interrupted is settled first, which may send messages.

        Args:
            optimizer: a loco optimizer, between two steps; it may be in the middle of a round.
            extra: whatever else the training needs (step, scheduler, data position): numbers, strings,
                tensors, and dicts, lists and tuples of them. Each rank has its own.
            blocking: return only when all ranks have written.

        Raises:
            CheckpointError: on all ranks: this checkpoint or the previous one could not be saved on one of
                them (a full disk, say), or the folder holds checkpoints of another training, optimizer or
                site. Nothing else is affected: training can go on, and `save` can be called again.
            TransportError: on all ranks: one of them is dead, stopped or cut off, or did not call `save`. As
                above, nothing else is affected.
        """
        while True:
            try:
                return self._save(optimizer, extra, blocking=blocking)
            except NeededError as error:
                _log.warning("%s. This rank reconnects before it saves", error)
                optimizer.reconnect()

    def _save(self, optimizer: Saveable, extra: Any, *, blocking: bool) -> None:
        rendezvous, reconnection = optimizer.topology.notes, optimizer.is_reconnection_waiting
        directory = self._directory(optimizer)
        tree: dict[str, Any] = {}
        held: list[Manifest] = []
        failure: Exception | None = None
        try:
            optimizer.settle()  # whether an interrupted round counts decides the position
        except Exception as error:
            failure = error
        position = Position(optimizer.round, optimizer.local_step)
        phase = f"saving {position}{self._label(rendezvous)}"
        if blocking and failure is None and rendezvous.missed(f"after {phase}"):
            swap_or_fail(rendezvous, {}, None, f"after {phase}")  # all ranks had written it
            return
        try:
            if failure is not None:
                raise failure
            self.wait()
            tree = host_copy({"optimizer": optimizer.state_dict(), "extra": extra})
            held = self._held(optimizer, directory)
        except Exception as error:
            failure = error
        note: dict[str, Any] = {"save": uuid.uuid4().hex}
        note["held"] = [[*m.position, m.save] for m in held if m.world == directory.world]
        notes = swap_or_fail(rendezvous, note, failure, phase, reconnection)
        save = notes[0]["save"]
        self._optimizer = weakref.ref(optimizer)
        self._own_saves.add(save)
        held_by_all = [entry for entry in note["held"] if all(entry in other["held"] for other in notes)]
        complete = [Position(round, step) for round, step, _ in held_by_all]
        if position in complete:
            return  # replacing it would put at risk what all ranks hold

        def write(folder: Path) -> None:
            FORMATS[self.format][0](tree, folder)
            manifest_of(tree["optimizer"], save=save, format=self.format, folder=folder).write(folder)

        def work() -> None:
            directory.sweep()
            directory.drop(self._outdated(directory, position, held, complete))
            directory.put(position, write, lambda: self._held(optimizer, directory))

        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="loco-checkpoint")
        self._writing = self._writer.submit(_reported, work, directory, position)
        if blocking:
            try:
                self.wait()
            except Exception as error:
                failure = error
            swap_or_fail(rendezvous, {}, failure, f"after {phase}", reconnection)

    def _held(self, optimizer: Saveable, directory: CheckpointDirectory) -> list[Manifest]:
        """This rank's whole checkpoints, if all of them are of this training and this optimizer.

        Raises:
            CheckpointError: they are not.
        """
        previous = None if self._optimizer is None else self._optimizer()
        if previous is not None and previous is not optimizer:
            raise CheckpointError(
                f"this loco.Checkpoints saves another optimizer to {self.folder}: give each optimizer a "
                f"loco.Checkpoints and a folder of its own"
            )
        held = directory.whole()
        if foreign := [m for m in held if m.save not in self._own_saves]:
            raise CheckpointError(
                f"{self.folder} holds checkpoints that this loco.Checkpoints has neither saved nor loaded "
                f"({foreign[-1].position} is the newest): call load() before the first save(), and give each "
                f"training and each optimizer a folder of its own"
            )
        return held

    def _label(self, rendezvous: Agreement) -> str:
        """Distinguishes several folders of one training: the second one and later have a number."""
        number = rendezvous.number_of(self)
        return f" to folder {number + 1}" if number else ""

    def _outdated(
        self,
        directory: CheckpointDirectory,
        position: Position,
        held: list[Manifest],
        complete: list[Position],
    ) -> list[Position]:
        """The positions whose checkpoints may go before `position` is written; all ranks hold `complete`."""
        newest_complete = max((other for other in complete if other < position), default=None)
        kept = [m.position for m in held if m.position < position][-(self.keep - 1) :]
        return [
            other
            for other in directory.positions()
            # Later positions are of the run that was resumed from: `load` could not use them.
            if (other > position and self._has_resumed)
            or (newest_complete is not None and other < newest_complete and other not in kept)
        ]

    def wait(self) -> None:
        """Return when this rank's last checkpoint is on disk.

        Raises:
            CheckpointError: it could not be written; names the path, the reason and what to do.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def load(
        self, optimizer: Saveable, *, sites: Sequence[int | None] | None = None, lost: Sequence[int] = ()
    ) -> Resumed | None:
        """Load the newest checkpoint that all ranks hold whole. All ranks load it, or none does.

        With as many sites as before, the training goes on bit for bit as if it had never stopped. Damaged
        checkpoints are skipped, with a warning that names them.

        With another number of sites nothing is lost either. A joining site needs no files: it receives θ, m,
        hyperparameters and `extra` from site 0, and starts with an empty residual and a fresh inner state.
        What a leaving site has not sent yet, s = Δ + e, is added to the residuals of the others, so that the
        sum over all sites stays the same to the last bit; a warning counts the elements that no FP32 residual
        can hold exactly, and that are rounded.

        A site that comes and goes loads its own newest checkpoint. If the other sites have done more rounds,
        it takes θ, m and the round from them and begins a new round; its residual is kept only if the
        checkpoint is of the last round in which it took part, because part of an older one may have been sent
        since.

        Args:
            optimizer: built like the saved one: same settings, parameters and ranks per site.
            sites: for each new site the old site that it continues, or None for a joining one; by default the
                first sites continue, and the others join or leave. Site 0 must continue one. Needed only
                once: the next checkpoint has the new numbers.
            lost: old sites whose files are gone, and with them what they had not sent.

        Returns:
            The position and the `extra` that was saved; None if there is no checkpoint.

        Raises:
            ValueError: on all ranks: the checkpoint is of another training (other settings, parameters, wire
                version, ranks per site), or `sites` and `lost` don't match it.
            CheckpointError: on all ranks: there are checkpoints, but none that all ranks hold; or the files
                of a leaving site are not visible; or they belong to another site that comes and goes; or a
                rank could not load its part.
            ReplicaError: the files do not hold the same θ for all sites.
            TransportError: a rank is dead, stopped or cut off.

            After each of these nothing has changed. The only exception: if "completing the load" fails,
            on any rank, load again on all of them.
        """
        with suppress(CheckpointError):  # which was logged
            self.wait()
        directory, rendezvous = self._directory(optimizer), optimizer.topology.notes
        saves, damaged = all_saves(rendezvous, directory, sites, lost, self._label(rendezvous))
        resumed = resume(optimizer, directory, saves, damaged, sites, lost)
        self._optimizer = weakref.ref(optimizer)
        self._own_saves |= saves.keys()
        self._has_resumed = Position(optimizer.round, optimizer.local_step) > Position(0, 0)
        return resumed

    def close(self) -> None:
        """Wait for the last checkpoint, as `wait` does, and end the writing thread."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _directory(self, optimizer: Saveable) -> CheckpointDirectory:
        all_ranks = optimizer.topology.everyone()
        return CheckpointDirectory(self.folder, all_ranks.rank, all_ranks.size, site_name(optimizer.topology))


def _reported(work: Callable[[], None], directory: CheckpointDirectory, position: Position) -> None:
    """Do the work of the writing thread. Errors are logged too, in case nobody calls `wait` any more."""
    try:
        work()
    except CheckpointError as error:
        _log.error("%s", error)
        raise
    except Exception as error:
        failure = CheckpointError(
            f"{directory.path(position, directory.rank)} could not be written ({type(error).__name__}: "
            f"{error}; {directory.free_space()}): the checkpoints before it are unchanged. Free some space "
            f"or repair the disk, and save again"
        )
        _log.error("%s", failure)
        raise failure from error
