"""Writes a publisher's versions into a store."""

import hashlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch

from ...errors import AuthenticationError
from ...logs import Progress
from ..errors import DamagedError, MixedVersionError, TakenOverError
from ..storage.names import Buffer
from ..storage.stores import Store
from .layout import Layout, name_of_dtype
from .manifest import (
    FOLDER,
    LAST_VERSION,
    Body,
    File,
    Manifest,
    Stream,
    load_or_none,
    name_of,
    parse_name,
    path_of_file,
)
from .retention import remove_old, remove_orphans
from .ties import why_mixed
from .training import training_of

logger = logging.getLogger(__name__)


class Writer:
    """
    Args:
        key: seals the manifests, if there is one.
        training: its name. None: the identity that the store has.
    """

    def __init__(self, store: Store, stream: Stream, key: bytes | None, training: str | None) -> None:
        self._store, self._stream, self._key, self._training = store, stream, key, training
        self._attempt, self._written = "", list[str]()  # of the version that is being written
        self._newest = 0  # of this publisher's versions in the store, also of an earlier process
        self._foreign = set[str]()  # names in the place of manifests that are none of this training
        self._unsure: Manifest | None = None  # the store has failed, and may have it or not
        self._may_have_orphans = True  # of a publisher that was killed
        self._has_warned = False

    @property
    def training(self) -> str:
        """
        Raises:
            OSError: the store can't say it.
        """
        if self._training is None:
            self._training = training_of(self._store)
        return self._training

    def begin(self, asked: int | None, last: int | None) -> tuple[int, bool]:
        """-> the version to write, and whether the last one is still there

        Args:
            last: that this publisher has written; None: it is its first.

        Raises:
            TakenOverError: somebody else has written one since.
            ValueError: what is asked for can't be the next one.
        """
        names = self._store.names(FOLDER)
        own = [name for name in names if (found := parse_name(name)) and found[1] == self._stream]
        self._newest = self._newest_of(own, last or 0)
        if last is not None and self._newest > last:
            raise self._taken_over(self._newest)
        if last is not None and len(own) == len(names):
            self._warn_if_alone()
        self._attempt = uuid.uuid4().hex[:8]
        unsure = self._unsure.version if self._unsure else 0  # it may come yet
        if asked is None:
            if self._stream.count > 1:
                raise ValueError(
                    "version must be given where several publishers share the work, such as the step"
                )
            asked = max(self._newest_of(names, last or 0), unsure) + 1
            while name_of(asked, self._stream) in self._foreign:
                asked += 1
        elif asked <= self._newest:
            raise ValueError(f"version must be > {self._newest}, which is published, got {asked}")
        elif name_of(asked, self._stream) in own:
            raise ValueError(f"version must be one that is free: {self._store.url} has a file for {asked}")
        if asked > LAST_VERSION:
            raise ValueError(f"version must be <= {LAST_VERSION}, got {asked}")
        return asked, last is not None and name_of(last, self._stream) in own

    def _warn_if_alone(self) -> None:
        """Its versions are of no use to anybody."""
        if self._stream.count > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "nobody else publishes into %s: its versions are parts of those of %d publishers, which all "
                "must publish into one store that all of them reach",
                self._store.url,
                self._stream.count,
            )

    def _newest_of(self, names: list[str], least: int) -> int:
        """The newest version of this training, or `least`. A file that is none stops no publisher."""
        found = filter(None, map(parse_name, names))
        for version, stream in sorted(found, reverse=True):
            if version <= least:
                break
            name = name_of(version, stream)
            if name not in self._foreign and self._is_of_this_training(version, stream):
                return version
        return least

    def _is_of_this_training(self, version: int, stream: Stream) -> bool:
        try:
            manifest = load_or_none(self._store, version, stream, self._key)
        except (DamagedError, AuthenticationError) as error:
            what = str(error)
        else:
            if manifest is None or manifest.training == self.training:
                return manifest is not None
            what = f"{manifest.path} is of another training"
        logger.warning("%s: its number is left out", what)
        self._foreign.add(name_of(version, stream))
        return False

    def settle(self) -> Manifest | None:
        """The manifest of which it was not known whether it is in the store, if it is there.

        Raises:
            OSError: that still can't be told.
        """
        unsure = self._unsure
        if unsure is None or not self._is_there(unsure):
            return None
        self._end()
        return unsure

    def discard(self) -> None:
        """Remove the files of a version that could not be written, as far as the store allows."""
        self._may_have_orphans = True
        if self._unsure is None:
            with suppress(OSError):
                for path in self._written:
                    self._store.delete(path)
        self._written = []

    def newest(self) -> int:
        """The last version of any publisher, complete or not; 0 if there is none."""
        return self._newest_of(self._store.names(FOLDER), 0)

    def layout(self, layout: Layout) -> None:
        self._store.write(f"layouts/{layout.digest}.json", layout.text)

    def file(
        self,
        version: int,
        bodies: Mapping[torch.dtype, Iterable[Buffer]],
        *,
        base: int | None = None,
        base_digest: str = "",
        entries: Mapping[torch.dtype, int] | None = None,
    ) -> File:
        """An anchor, or a patch from version `base`.

        Args:
            bodies: in chunks, each of which is written before the next is asked for.
        """
        path = path_of_file(version, self._stream, self._attempt, base)
        self._written.append(path)
        sizes, digest = dict.fromkeys(bodies, 0), hashlib.sha256()

        def chunks() -> Iterator[Buffer]:
            for format, body in bodies.items():
                for chunk in body:
                    sizes[format] += len(chunk)
                    digest.update(chunk)
                    yield chunk

        with Progress(logger, f"writing {path}", None, lambda: sum(sizes.values())):
            self._store.write_chunks(path, chunks())
        changed = entries or {}
        return File(
            path=path,
            bytes=sum(sizes.values()),
            sha256=digest.hexdigest(),
            base=base,
            base_digest=base_digest,
            bodies=tuple(
                Body(format=name_of_dtype(format), bytes=size, entries=changed.get(format, 0))
                for format, size in sizes.items()
            ),
        )

    def commit(self, manifest: Manifest) -> int:
        """The version is there when this returns. -> the manifest's bytes

        Raises:
            TakenOverError: it was there already.
            MixedVersionError: another publisher has written another version of this number.
        """
        self._check_ties(manifest)
        said = manifest.dump(self._key)
        self._unsure = manifest
        try:
            self._store.create(manifest.path, said)
        except OSError as error:  # also of a connection that broke when the server had it already
            if not self._is_there(manifest):
                if not isinstance(error, ConnectionError | TimeoutError):  # a server may be about to write it
                    self._unsure = None
                if isinstance(error, FileExistsError):
                    raise self._taken_over(manifest.version) from error
                raise
        self._end()
        return len(said)

    def _check_ties(self, manifest: Manifest) -> None:
        """With one of the others that are there. Where two write at once subscribers find out."""
        if manifest.count == 1:
            return
        for version, stream in filter(None, map(parse_name, self._store.names(FOLDER))):
            if version == manifest.version and stream.count == manifest.count and stream != self._stream:
                with suppress(DamagedError, AuthenticationError):
                    other = load_or_none(self._store, version, stream, self._key)
                    if other and (why := why_mixed([other, manifest])):
                        raise MixedVersionError(
                            f"version {version} was not published: {why}. All publishers must hold the same "
                            f"weights, as after a round, and what an earlier attempt left takes its number"
                        )
                return

    def remove_old(self, keep: int, known: dict[int, Manifest]) -> None:
        """Make room for the next version, also in `known`: a store that is full takes one only then. If it
        fails that fails no version: it is logged, and tried again."""

        def read(version: int) -> Manifest | None:
            try:
                return known.get(version) or load_or_none(self._store, version, self._stream, self._key)
            except (DamagedError, AuthenticationError) as error:
                logger.info("%s", error)
                self._may_have_orphans = True  # nobody knows its files' names
                return None

        try:
            for gone in remove_old(self._store, self._stream, keep, self._newest, read):
                known.pop(gone, None)
            if self._may_have_orphans:
                self._may_have_orphans = remove_orphans(self._store, self._stream, self._newest, read)
        except OSError as error:
            self._may_have_orphans = True
            logger.warning("what is no longer needed was not removed: %s", error)

    def _is_there(self, manifest: Manifest) -> bool:
        try:
            said = manifest.dump(self._key)
            return self._store.read(manifest.path, len(said) + 1) == said
        except FileNotFoundError:
            return False

    def _end(self) -> None:
        """The version is there."""
        self._unsure, self._written = None, []

    def _taken_over(self, version: int) -> TakenOverError:
        return TakenOverError(
            f"version {version} was published by another process: two publishers use {self._store.url} as "
            f"stream {self._stream}"
        )
