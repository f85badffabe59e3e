"""Where a rank's checkpoints stand: each is there whole, or not at all, whenever the power goes.

folder/round-00000012/rank-00003/                at the end of round 12
folder/round-00000012-step-00005/rank-00003/     five inner steps later
folder/.partial-rank-00003-…/                    being written, or being removed
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .manifest import Manifest, Position, read_manifest

_log = logging.getLogger(__name__)
_POSITION = re.compile(r"round-(\d{8,})(?:-step-(\d{5,}))?")
_RANK = re.compile(r"rank-(\d{5,})")
_PARTIAL = re.compile(r"\.partial-rank-(\d{5,})-[0-9a-f]{32}([0-9a-f]*)")


class CheckpointDirectory:
    """The folder that a rank saves to, whether it shares it with other ranks or not.

    Ranks that are no more, of a time when there were more of them, leave folders behind: rank r looks after
    those of all k with k mod world = r.

    name: of a site that comes and goes. It is the only rank of its folder.
    """

    def __init__(self, folder: Path, rank: int, world: int, name: str = "") -> None:
        self.folder, self.rank, self.world, self.name = folder, rank, world, name
        # Of sites that share a folder by mistake none may sweep away what another one is just writing.
        self._tag = hashlib.blake2b(name.encode(), digest_size=4).hexdigest() if name else ""

    def path(self, position: Position, rank: int) -> Path:
        step = f"-step-{position.local_step:05d}" if position.local_step else ""
        return self.folder / f"round-{position.round:08d}{step}" / f"rank-{rank:05d}"

    def positions(self, *, own: bool = False) -> list[Position]:
        """At which there is a folder that this rank looks after (or is its own), whole or not."""
        ours = [
            at
            for at, rank, _ in self._folders()
            if rank == self.rank or (not own and self._looks_after(rank))
        ]
        return sorted(set(ours))

    def whole(self, *, of_all: bool = False) -> list[Manifest]:
        """The complete checkpoints of this rank, or of all ranks that can be seen from here, oldest first.

        What of this rank's is damaged is passed over with a warning.

        Raises:
            CheckpointError: this site has a name, and the folder holds what another one saved.
        """
        found = []
        for position, rank, path in self._folders():
            if rank != self.rank and not of_all:
                continue
            try:
                manifest = read_manifest(path)
                if (manifest.position, manifest.rank) != (position, rank):
                    raise ValueError(f"{path} holds {manifest.position} of rank {manifest.rank}")
            except (ValueError, OSError) as error:
                if rank == self.rank:
                    _log.warning("a checkpoint is passed over: %s", error)
                continue
            if self.name and manifest.name != self.name:
                raise CheckpointError(
                    f"{path} is of {f'site {manifest.name}' if manifest.name else 'a run of fixed sites'}, "
                    f"and this is site {self.name}: give each site a folder of its own, and the same name "
                    f"whenever it comes back"
                )
            found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.position)

    def put(self, position: Position, write: Callable[[Path], None]) -> None:
        """Have `write` fill a folder, and put it in its place when it is on the disk.

        Raises:
            OSError: it could not be written; nothing is there of it.
            CheckpointError: as `whole`; nothing is there of it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        partial, replaced = self._partial(), self._partial()
        place = self.path(position, self.rank)
        partial.mkdir()
        try:
            write(partial)
            for path in partial.iterdir():
                _flush(path)
            _flush(partial)
            while True:
                place.parent.mkdir(exist_ok=True)
                try:
                    if place.exists():  # of a run that went another way from an older checkpoint
                        self.whole()  # or of another site, which saved here since it was looked at
                        place.rename(replaced)
                    partial.rename(place)
                    break
                except FileNotFoundError:
                    # Another rank has just removed the round's folder because it was empty.
                    if not partial.exists():
                        raise
            _flush(place.parent)
            _flush(self.folder)
        finally:
            if replaced.exists() and not place.exists():
                replaced.rename(place)
            for left in (partial, replaced):
                shutil.rmtree(left, ignore_errors=True)

    def drop(self, positions: list[Position]) -> None:
        """Remove checkpoints. Each leaves its place in one step, so that none is ever seen half removed."""
        for position, rank, path in list(self._folders()):
            if position in positions and self._looks_after(rank):
                gone = self._partial()
                path.rename(gone)
                shutil.rmtree(gone)
                try:
                    path.parent.rmdir()
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise

    def sweep(self) -> None:
        """Remove what writers that died have left."""
        for path in self.folder.glob(".partial-rank-*"):
            match = _PARTIAL.fullmatch(path.name)
            if match and self._looks_after(int(match[1])) and match[2] == self._tag:
                shutil.rmtree(path)

    def room(self) -> str:
        """For a person who wonders why it could not be written."""
        try:
            return f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB are free there"
        except OSError as error:
            return str(error)

    def _looks_after(self, rank: int) -> bool:
        return rank % self.world == self.rank

    def _partial(self) -> Path:
        return self.folder / f".partial-rank-{self.rank:05d}-{uuid.uuid4().hex}{self._tag}"

    def _folders(self) -> Iterator[tuple[Position, int, Path]]:
        """Every rank's folder that can be seen."""
        if not self.folder.exists():
            return
        for at in list(self.folder.iterdir()):
            if match := _POSITION.fullmatch(at.name):
                position = Position(int(match[1]), int(match[2] or 0))
                try:
                    folders = list(at.iterdir())
                except (FileNotFoundError, NotADirectoryError):  # another rank may have removed it just now
                    continue
                for path in folders:
                    if of := _RANK.fullmatch(path.name):
                        yield position, int(of[1]), path


def _flush(path: Path) -> None:
    """To the disk, and not only to the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't do this for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
