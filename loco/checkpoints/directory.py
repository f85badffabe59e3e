"""One rank's checkpoints on disk. Each is there whole or not at all, even if the power fails.

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
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from .rank_manifest import Position, RankManifest, read_manifest

_log = logging.getLogger(__name__)
_POSITION = re.compile(r"round-(\d{8,})(?:-step-(\d{5,}))?")
_RANK = re.compile(r"rank-(\d{5,})")
_PARTIAL = re.compile(r"\.partial-rank-(\d{5,})-[0-9a-f]{32}([0-9a-f]*)")


class CheckpointDirectory:
    """The folder that a rank saves to, whether it shares it with other ranks or not.

    If there were more ranks in an earlier run, their folders are still there: rank r manages those of all
    ranks k with k mod world = r.

    Args:
        site_name: of a site that comes and goes. It is the only rank of its folder.
    """

    def __init__(self, folder: Path, rank: int, world: int, site_name: str = "") -> None:
        self.folder, self.rank, self.world, self.site_name = folder, rank, world, site_name
        # If sites share a folder by mistake, none may remove what another one is writing.
        self._tag = hashlib.blake2b(site_name.encode(), digest_size=4).hexdigest() if site_name else ""

    def path(self, position: Position, rank: int) -> Path:
        step = f"-step-{position.local_step:05d}" if position.local_step else ""
        return self.folder / f"round-{position.round:08d}{step}" / f"rank-{rank:05d}"

    def positions(self) -> set[Position]:
        """Of all folders that this rank manages, whole or damaged."""
        return {position for position, rank, _ in self._folders() if self._manages(rank)}

    def whole(self, *, of_all_ranks: bool = False) -> tuple[list[RankManifest], bool]:
        """The complete checkpoints of this rank, or of all ranks visible in this folder, oldest first; and
        whether this rank has a damaged one, which a warning names.

        Raises:
            CheckpointError: this site has a name, and the folder holds checkpoints of another site.
        """
        found, is_damaged = [], False
        for position, rank, path in self._folders():
            if rank != self.rank and not of_all_ranks:
                continue
            try:
                manifest = read_manifest(path)
                if (manifest.position, manifest.rank) != (position, rank):
                    raise ValueError(f"{path} holds {manifest.position} of rank {manifest.rank}")
            except (ValueError, OSError) as error:
                if rank == self.rank:
                    is_damaged = True
                    _log.warning("skipping a checkpoint: %s", error)
                continue
            if self.site_name and manifest.name != self.site_name:
                owner = f"site {manifest.name}" if manifest.name else "a run of fixed sites"
                raise CheckpointError(
                    f"{path} is of {owner}, but this is site {self.site_name}: give each site a folder of "
                    f"its own, and the same name whenever it comes back"
                )
            found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.position), is_damaged

    def replace(
        self,
        outdated: Callable[[set[Position]], set[Position]],
        position: Position,
        write: Callable[[Path], None],
        check: Callable[[], object],
    ) -> None:
        """Remove what is outdated, of the positions there are, or was left by killed writers, and `put` a
        checkpoint.

        Raises:
            CheckpointError: it could not be written. It is logged, in case nobody waits for it any more.
        """
        try:
            self.drop(outdated(self.positions()))
            self.sweep()
            self.put(position, write, check)
        except CheckpointError as error:
            _log.error("%s", error)
            raise
        except Exception as error:
            free = "unknown"
            with suppress(OSError):
                free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f}"
            failure = CheckpointError(
                f"{self.path(position, self.rank)} could not be written ({type(error).__name__}: {error}; "
                f"{free} MB are free there): the checkpoints before it are unchanged. Free some space or "
                f"repair the disk, and save again"
            )
            _log.error("%s", failure)
            raise failure from error

    def put(
        self, position: Position, write: Callable[[Path], None], check: Callable[[], object] | None = None
    ) -> None:
        """Let `write` fill a temporary folder, flush it to disk, and rename it to its final path.

        Args:
            check: called, or else `whole`, before anything is replaced, to raise an error if it must not be.

        Raises:
            OSError, CheckpointError: it could not be written; nothing of it is left.
        """
        _make_durable_folder(self.folder)
        partial, replaced = self._partial(), self._partial()
        final = self.path(position, self.rank)
        partial.mkdir()
        try:
            write(partial)
            for path in (*partial.iterdir(), partial):
                _flush(path)
            while True:
                final.parent.mkdir(exist_ok=True)
                try:
                    if final.exists():  # of a run that took another way from an older checkpoint
                        (check or self.whole)()  # or of another site or optimizer, which saved it just now
                        final.rename(replaced)
                    partial.rename(final)
                    break
                except FileNotFoundError:
                    # Another rank has just removed the round's folder because it was empty.
                    if not partial.exists():
                        raise
            _flush(final.parent)
            _flush(self.folder)
        finally:
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            for path in (partial, replaced):
                shutil.rmtree(path, ignore_errors=True)

    def drop(self, positions: set[Position]) -> None:
        """Leave checkpoints to `sweep`, under another name, so that none is ever seen half removed."""
        for position, rank, path in self._folders():
            if position in positions and self._manages(rank):
                path.rename(self._partial())

    def sweep(self) -> None:
        """Remove what was dropped, or left behind by writers that were killed, and rounds without a rank."""
        for path in self._entries():
            match = _PARTIAL.fullmatch(path.name)
            if match and self._manages(int(match[1])) and match[2] == self._tag:
                shutil.rmtree(path)
            elif _POSITION.fullmatch(path.name):
                with suppress(OSError):  # it is not empty, or another rank has just removed it
                    path.rmdir()

    def _manages(self, rank: int) -> bool:
        return rank % self.world == self.rank

    def _partial(self) -> Path:
        return self.folder / f".partial-rank-{self.rank:05d}-{uuid.uuid4().hex}{self._tag}"

    def _entries(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.exists() else []

    def _folders(self) -> Iterator[tuple[Position, int, Path]]:
        """Every rank's folders that this rank can see."""
        for parent in self._entries():
            if match := _POSITION.fullmatch(parent.name):
                paths: list[Path] = []
                with suppress(FileNotFoundError, NotADirectoryError):  # another rank may have just removed it
                    paths += parent.iterdir()
                for path in paths:
                    if rank := _RANK.fullmatch(path.name):
                        yield Position(int(match[1]), int(match[2] or 0)), int(rank[1]), path


def _make_durable_folder(folder: Path) -> None:
    """Create a folder with its missing parents, so that it is still there after a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        with suppress(PermissionError):  # a folder may be writable but not readable
            _flush(path.parent)


def _flush(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't do this for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
