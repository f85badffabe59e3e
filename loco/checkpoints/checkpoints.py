"""Checkpoints of a training, written while it goes on."""

import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..coordination.rendezvous import NeededError
from ..errors import SAME_STEPS, CheckpointError, advising
from ..logs import warn_once_per_machine
from . import formats
from .directory import CheckpointDirectory
from .plain_data import as_plain_data
from .protocol import Saveable
from .rank_manifest import Position, RankManifest, manifest_of, site_name
from .resharded_load import ReshardedLoad
from .restore import Load, Resumed, together

_log = logging.getLogger(__name__)
_DIED = "if a process has died, restart all sites from their last checkpoint"
_SAVE_AGAIN = f"Earlier checkpoints are as they were: save again on all ranks; {_DIED}"
_LOAD_AGAIN = f"Load again on all ranks; {_DIED}"


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
    CheckpointError. Sites that come and go (a lighthouse) save and load independently of each other,
    each in a folder of its own, `Checkpoints(folder / name)`.

    Args:
        folder: where to save; created if it does not exist.
        keep: how many of the newest checkpoints to keep; at least 2, because one is never replaced before
            the next is complete.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(
                f"keep must be >= 2, got {keep}: one stays until all ranks have written the next"
            )
        self.folder, self.keep = Path(folder), keep
        self._optimizer: Callable[[], Saveable | None] = lambda: None  # the one saved or loaded here, weakly
        self._own_saves: set[str] = set()  # saves in the folder that are of this training
        self._has_resumed = False  # from a checkpoint that `load` found
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @advising(_SAVE_AGAIN, SAME_STEPS)
    def save(self, optimizer: Saveable, extra: Any = None, *, blocking: bool = False) -> None:
        """Save the whole state of `optimizer`, and `extra`. Call it on every rank at the same step.

        The state is copied to host memory, which takes as much memory as the state, and a thread writes it
        while training goes on; the next `save` waits for that thread. If all ranks have already saved this
        step, that checkpoint stays as it is. A round that was interrupted is settled first, which may send
        messages.

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
                warn_once_per_machine(_log, "%s. Ranks reconnect before they save", error)
                optimizer.topology.rendezvous.reconnect()

    def _save(self, optimizer: Saveable, extra: Any, *, blocking: bool) -> None:
        rendezvous = optimizer.topology.rendezvous
        directory, failure = self._directory(optimizer), None
        try:
            optimizer.settle()  # whether an interrupted round counts decides the position
        except Exception as error:
            failure = error
        position = Position(optimizer.round, optimizer.steps_since_round)
        phase = f"saving {position}{self._label(optimizer)}"
        if blocking and failure is None and rendezvous.missed(f"after {phase}"):
            together(rendezvous, f"after {phase}", lambda _: None)  # all ranks had written it
            return

        def prepare(note: dict[str, Any]) -> tuple[dict[str, Any], list[RankManifest]]:
            if failure is not None:
                raise failure
            self.wait()
            whole = {"optimizer": optimizer.state_dict(), "extra": extra}
            tree = formats.host_copy(as_plain_data(whole, optimizer.outer_state.parameters.params))
            held = self._held(optimizer, directory)
            note["save"] = uuid.uuid4().hex
            note["held"] = [[*m.position, m.save] for m in held if m.world == directory.world]
            return tree, held

        (tree, held), notes = together(rendezvous, phase, prepare)
        save = notes[0]["save"]
        self._optimizer = weakref.ref(optimizer)
        self._own_saves.add(save)
        held_by_all = [entry for entry in notes[0]["held"] if all(entry in note["held"] for note in notes)]
        complete = [Position(round, step) for round, step, _ in held_by_all]
        if position in complete:
            return  # replacing it would put at risk what all ranks hold

        def fill(folder: Path) -> None:
            formats.write(tree, folder)
            manifest_of(tree["optimizer"], save=save, folder=folder).write(folder)

        def write() -> None:
            directory.replace(
                lambda found: self._outdated(found, position, [m.position for m in held], complete),
                position,
                fill,
                lambda: self._held(optimizer, directory),
            )

        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="loco-checkpoint")
        self._writing = self._writer.submit(write)
        if blocking:
            together(rendezvous, f"after {phase}", lambda _: self.wait())

    def _held(self, optimizer: Saveable, directory: CheckpointDirectory) -> list[RankManifest]:
        """This rank's whole checkpoints, if all of them are of this training and this optimizer.

        Raises:
            CheckpointError: they are not.
        """
        if self._optimizer() not in (None, optimizer):
            raise CheckpointError(
                f"this loco.Checkpoints saves another optimizer to {self.folder}: give each optimizer a "
                f"loco.Checkpoints and a folder of its own"
            )
        held, _ = directory.whole()
        if foreign := [m for m in held if m.save not in self._own_saves]:
            raise CheckpointError(
                f"{self.folder} holds checkpoints that this loco.Checkpoints has neither saved nor loaded "
                f"({foreign[-1].position} is the newest): call load() before the first save(), and give each "
                f"training and each optimizer a folder of its own"
            )
        return held

    def _label(self, optimizer: Saveable) -> str:
        """Distinguishes several folders of one training: the second one and later have a number."""
        number = optimizer.topology.rendezvous.number_of(self)
        return f" to folder {number + 1}" if number else ""

    def _outdated(
        self, found: set[Position], position: Position, held: list[Position], complete: list[Position]
    ) -> set[Position]:
        """Those of the positions found that may go before `position` is written. This rank holds a whole
        checkpoint of each of `held`, and all ranks of each of `complete`."""
        newest_complete = max((other for other in complete if other < position), default=Position(0, 0))
        kept = [other for other in held if other < position][1 - self.keep :]
        outdated = {other for other in found if other < newest_complete and other not in kept}
        if self._has_resumed:  # later ones are of the run that was resumed from: `load` could not use them
            outdated |= {other for other in found if other > position}
        return outdated

    def wait(self) -> None:
        """Return when this rank's last checkpoint is on disk.

        Raises:
            CheckpointError: it could not be written; names the path, the reason and what to do.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @advising(_LOAD_AGAIN)
    def load(
        self,
        optimizer: Saveable,
        *,
        sites: Sequence[int | None] | None = None,
        lost: Sequence[int] = (),
        reshard: bool = False,
    ) -> Resumed | None:
        """Load the newest checkpoint that all ranks hold whole. All ranks load it, or none does.

        With as many sites as before, the training goes on bit for bit as if it had never stopped. With
        another number no update is lost either: joining sites receive θ, m, hyperparameters and `extra` from
        site 0, and what leaving sites have not sent yet is added to the residuals of the others. A warning
        counts the elements that no residual can hold exactly; another one names damaged checkpoints, which
        are skipped.

        A site that comes and goes loads its own newest checkpoint. If the other sites have done more rounds,
        it takes θ, m and the round from them; its residual is kept only if no part of it can have been sent
        since.

        Args:
            optimizer: built like the saved one: same settings, parameters and ranks per site.
            sites: for each new site the old site that it continues, or None for a joining one; by default the
                first sites continue, and the others join or leave. Site 0 must continue one. Needed only
                once: the next checkpoint has the new numbers.
            lost: old sites whose files are gone, and with them what they had not sent.
            reshard: parameters may be sharded otherwise than when they were saved, also among another number
                of ranks per site. The number of sites must be the same. Every rank reads the files of all
                ranks of its site, so `folder` must be shared by them.

        Returns:
            The position and the `extra` that was saved; None if there is no checkpoint.

        Raises:
            ValueError: on all ranks: the checkpoint is of another training (other settings, parameters, ranks
                per site), or `sites` and `lost` don't match it.
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
        if reshard and (sites is not None or lost):
            raise ValueError("reshard needs the same sites: load with reshard, save, and load with others")
        directory = self._directory(optimizer)
        call = ReshardedLoad(optimizer, directory) if reshard else Load(optimizer, directory, sites, lost)
        resumed, saves = call.run(self._label(optimizer))
        self._optimizer = weakref.ref(optimizer)
        self._own_saves |= saves
        self._has_resumed = Position(optimizer.round, optimizer.steps_since_round) > Position(0, 0)
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
        all_ranks = optimizer.topology.all_ranks()
        return CheckpointDirectory(self.folder, all_ranks.rank, all_ranks.size, site_name(optimizer.topology))
