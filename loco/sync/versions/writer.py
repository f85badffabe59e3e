"""What a publisher writes into a store."""

import hashlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch

from ...errors import AuthenticationError
from ..errors import DamagedError, TakenOverError
from ..storage.names import Buffer
from ..storage.stores import Store
from .layout import Layout, name_of_dtype
from .manifest import FOLDER, Body, File, Manifest, Stream, load_or_none, parse_name, path_of_file
from .retention import remove_old, remove_orphans, versions_of

logger = logging.getLogger(__name__)


class Writer:
    """
    Args:
        key: seals the manifests, if there is one.
    """

    def __init__(self, store: Store, stream: Stream, key: bytes | None) -> None:
        self._store, self._stream, self._key = store, stream, key
        self._attempt, self._written = "", list[str]()  # of the version that is being written
        self._unsure: Manifest | None = None  # the store has failed, and may have it or not
        self._may_have_orphans = True  # of a publisher that was killed

    def begin(self, asked: int | None, last: int | None) -> tuple[int, bool]:
        """-> the version to write, and whether the last one is still there

        Args:
            last: that this publisher has written; None: it is its first.

        Raises:
            TakenOverError: somebody else has written one since.
            ValueError: what is asked for can't be the next one.
        """
        names = self._store.names(FOLDER)
        unsure = self._unsure.version if self._unsure else 0  # it may come yet
        newest = max(last or 0, unsure, _newest(names))
        own = max(versions_of(names, self._stream), default=0)
        if last is not None and own > last:
            raise self._taken_over(own)
        self._attempt = uuid.uuid4().hex[:8]
        if asked is None:
            if self._stream.count > 1:
                raise ValueError(
                    "version must be given where several publishers share the work, such as the step"
                )
            return newest + 1, own == last
        if asked <= max(own, last or 0):
            raise ValueError(f"version must be > {max(own, last or 0)}, which is published, got {asked}")
        return asked, own == last

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
        return _newest(self._store.names(FOLDER))

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
        """
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

    def remove_old(self, keep: int, known: dict[int, Manifest]) -> None:
        """Remove what nobody needs, also from `known`. A store that fails here fails no version: it is
        logged, and tried again."""

        def read(version: int) -> Manifest | None:
            try:
                return known.get(version) or load_or_none(self._store, version, self._stream, self._key)
            except (DamagedError, AuthenticationError) as error:
                logger.info("%s", error)
                self._may_have_orphans = True  # nobody knows its files' names
                return None

        try:
            for gone in remove_old(self._store, self._stream, keep, read):
                known.pop(gone, None)
            if self._may_have_orphans and known:
                remove_orphans(self._store, self._stream, max(known), read)
                self._may_have_orphans = False
        except OSError as error:
            self._may_have_orphans = True
            logger.warning("what is no longer needed was not removed: %s", error)

    def _is_there(self, manifest: Manifest) -> bool:
        try:
            return self._store.read(manifest.path) == manifest.dump(self._key)
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


def _newest(names: list[str]) -> int:
    return max([version for version, _ in filter(None, map(parse_name, names))], default=0)
