"""Checkpoints of a training, written while it goes on."""

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..coordination.rendezvous import Agreement, NeededError, swap_or_fail
from ..errors import CheckpointError
from ..members.fixed import Topology
from ..optimizer import LowCommunicationOptimizer
from .directory import CheckpointDirectory
from .formats import FORMATS
from .manifest import Manifest, Position, manifest_of, name_of
from .plain_tree import host_copy
from .restore import resume

_log = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoints of a training, each there whole or not at all.

        checkpoints = loco.Checkpoints("checkpoints")
        extra = checkpoints.load(optimizer)                 # None: there is nothing yet
        …
        checkpoints.save(optimizer, {"step": step})         # every now and then, on every rank

    Every rank saves a folder of its own, `folder/round-00000012/rank-00003/`: the data, and a `manifest.json`
    with the position in the training, the settings, the parameters, and size and SHA-256 of the data files.
    The folder may be one that all ranks share, or one on each machine.

    A folder is written beside its place, flushed to the disk, and moved there last, so that a crash never
    leaves half of one. A rank removes an old checkpoint only when it has heard that all ranks hold a newer
    one: there is one that all of them hold at any time, however many die, and whenever.

    Sites that come and go (`ElasticTopology`) save and load each on its own, whenever it likes, in a folder
    of its own, `Checkpoints(folder / name)`. Two that share one are told so.

    Args:
        folder: where to save; made if it is missing.
        keep: how many of the newest checkpoints stay; at least 2, because one is never replaced before the
            next is there.
        format: of the data: "torch", one file for `torch.load`; or "dcp", for the tools around
            `torch.distributed.checkpoint`. Either reads what the other wrote.

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
        self._at_home = False  # what lies in the folder is of this training
        self._took_up = False  # and this process went on from there
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def save(
        self, optimizer: LowCommunicationOptimizer, extra: Any = None, *, blocking: bool = False
    ) -> None:
        """Save all of `optimizer`, and `extra`, on every rank at the same place of the training loop.

        The state is copied to host memory, and written while training goes on, by one thread; the next
        `save` waits for it. It takes as much memory as the state. What all ranks have saved at this place
        already stays as it is.

        Args:
            optimizer: a loco optimizer, between two steps: inside a round, too.
            extra: what else the training needs (step, scheduler, data position): numbers, strings, tensors,
                and dicts, lists and tuples of them. Each rank has its own.
            blocking: return when all ranks have written.

        Raises:
            CheckpointError: on all ranks: this or the last checkpoint could not be saved on one of them
                (a full disk, say), or the folder holds another training's or site's. Nothing else is lost
                by it: training can go on, and `save` be called again.
            TransportError: on all ranks: one of them is dead, stopped or cut off, or did not come. As above.
        """
        while True:
            try:
                return self._save(optimizer, extra, blocking=blocking)
            except NeededError as error:
                _log.warning("%s. They are met first", error)
                for loop in optimizer.topology.notes.called():
                    loop.reconnect()

    def _save(self, optimizer: LowCommunicationOptimizer, extra: Any, *, blocking: bool) -> None:
        notes, directory = optimizer.topology.notes, _directory_of(self.folder, optimizer.topology)
        tree: dict[str, Any] = {}
        held: list[Manifest] = []
        failure: Exception | None = None
        try:
            optimizer._settle()  # a round whose end was cut off decides where this is
        except Exception as error:
            failure = error
        position = Position(optimizer.round, optimizer.local_step)
        what = f"saving {position}{self._named(notes)}"
        if blocking and failure is None and notes.missed(f"after {what}"):
            swap_or_fail(notes, {}, None, f"after {what}")  # all had written
            return
        try:
            if failure is not None:
                raise failure
            self.wait()
            tree = host_copy({"optimizer": optimizer.state_dict(), "extra": extra})
            held = directory.whole()
            if held and not self._at_home:
                raise CheckpointError(
                    f"{self.folder} holds a training's checkpoints already ({held[-1].position} is the "
                    f"newest): load() it before the first save(), or save to another folder"
                )
        except Exception as error:
            failure = error
        mine: dict[str, Any] = {"save": uuid.uuid4().hex}
        mine["held"] = [[*m.position, m.save] for m in held if m.world == directory.world]
        told = swap_or_fail(notes, mine, failure, what)
        self._at_home = True
        all_held = [note["held"] for note in told]
        common = [one for one in all_held[0] if all(one in of_rank for of_rank in all_held)]
        if any(Position(*one[:2]) == position for one in common):
            return  # one of this place is whole on all ranks: to replace it would put it at risk

        def write(folder: Path) -> None:
            FORMATS[self.format][0](tree, folder)
            outer, state = optimizer._outer, tree["optimizer"]
            manifest_of(outer, state, save=told[0]["save"], format=self.format, folder=folder).write(folder)

        def work() -> None:
            try:
                directory.sweep()
                directory.drop(self._outdated(directory, position, held, common))
                directory.put(position, write)
            except CheckpointError as error:
                _log.error("%s", error)
                raise
            except Exception as error:
                path = directory.path(position, directory.rank)
                failed = CheckpointError(
                    f"{path} could not be written ({type(error).__name__}: {error}; {directory.room()}): the "
                    f"checkpoints before it are as they were. Make room or mend the disk, and save again"
                )
                _log.error("%s", failed)  # in case that nobody asks any more
                raise failed from error

        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="loco-checkpoint")
        self._writing = self._writer.submit(work)
        if blocking:
            try:
                self.wait()
            except Exception as error:
                failure = error
            swap_or_fail(notes, {}, failure, f"after {what}")

    def _named(self, notes: Agreement) -> str:
        """Of several folders that a training saves to, the later ones are called by their numbers."""
        number = notes.number_of(self)
        return f" to folder {number + 1}" if number else ""

    def _outdated(
        self,
        directory: CheckpointDirectory,
        position: Position,
        held: list[Manifest],
        common: list[list[Any]],
    ) -> list[Position]:
        """What may go before `position` is written, by what this rank and all of them hold."""
        newest = max((Position(*at[:2]) for at in common if (at[0], at[1]) < position), default=None)
        stay = [m.position for m in held if m.position < position][-(self.keep - 1) :]
        return [
            at
            for at in directory.positions()
            # What lies ahead is of a training that went on from here, and was passed over by `load`.
            if (at > position and self._took_up) or (newest is not None and at < newest and at not in stay)
        ]

    def wait(self) -> None:
        """Until this rank's last checkpoint is on the disk.

        Raises:
            CheckpointError: it could not be written; names the path, the reason and what to do.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def load(
        self,
        optimizer: LowCommunicationOptimizer,
        *,
        sites: Sequence[int | None] | None = None,
        lost: Sequence[int] = (),
    ) -> Any:
        """Take up the newest checkpoint that all ranks hold whole, on every rank together.

        The training goes on bit for bit as if it had never stopped, if there are as many sites as before.
        What is damaged is passed over, with a warning that names it.

        With another number of sites nothing is lost either. θ and m are the same on all sites, so a joining
        site takes them over the network, needs no files, and starts with an empty residual, a fresh inner
        state, and site 0's hyperparameters and `extra`. What a site that leaves has not sent yet, s = Δ + e,
        is added to the residuals of the others, so that the sum over all sites stays the same to the last
        bit; where no FP32 holds a sum exactly it is rounded, and a warning counts such elements. From then on
        g is the mean over the new number of sites.

        A site that comes and goes loads the newest checkpoint of its own, and comes to the others with it. If
        one of them is further, θ, m and the round are theirs, w = cast(θ), and a new round begins; `extra` is
        as this site saved it. Its residual is kept only if the checkpoint is of the last round it took part
        in: of an older one a part may have been sent since, and it is dropped with a warning.

        Args:
            optimizer: built as the saved one was: same settings, parameters and ranks per site.
            sites: the old site that each new site continues, or None where a new one joins; without it the
                first ones go on and the others join or leave. Site 0 must continue one. Say it once: the next
                checkpoint has the new numbers.
            lost: old sites whose files are gone, and with them what they had not sent.

        Returns:
            `extra` as it was saved; None if there is no checkpoint.

        Raises:
            ValueError: on all ranks: the checkpoint is of another training (other settings, parameters, wire
                version, ranks per site), or `sites` and `lost` don't fit it; nothing was changed.
            CheckpointError: on all ranks: there are checkpoints, but none that all ranks hold, or the files
                of a site that leaves can't be seen, or they are another site's that comes and goes; nothing
                was changed.
            ReplicaError: what was loaded is not the same on all sites.
        """
        with suppress(CheckpointError):  # which was logged
            self.wait()
        directory, name = (
            _directory_of(self.folder, optimizer.topology),
            self._named(optimizer.topology.notes),
        )
        found = resume(optimizer, directory, sites, lost, name)
        self._at_home = True
        self._took_up = Position(optimizer.round, optimizer.local_step) > Position(0, 0)
        return found

    def close(self) -> None:
        """As `wait`, and end the thread that writes."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _directory_of(folder: Path, topology: Topology) -> CheckpointDirectory:
    everyone = topology.everyone()
    return CheckpointDirectory(folder, everyone.rank, everyone.size, name_of(topology))
