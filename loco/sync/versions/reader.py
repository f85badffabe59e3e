"""Reads manifests, layouts and files from a store, and remembers which of them are damaged."""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from loco import kernels

from ...errors import AuthenticationError
from ...logs import Progress
from ..errors import DamagedError, NoVersionError, OtherTrainingError, StaleStoreError
from ..storage.stores import Store
from .layout import Layout, digest_of, name_of_dtype
from .manifest import (
    FOLDER,
    Body,
    Manifest,
    Stream,
    complete_versions,
    load_or_none,
    name_of,
    what_is_missing,
)
from .retention import versions_of
from .route import Step
from .ties import why_mixed

logger = logging.getLogger(__name__)
_ENDING = 1.0  # seconds for threads that read what an error has made useless
_Of = TypeVar("_Of")
_Found = TypeVar("_Found")
_FORMATS = {name_of_dtype(format): format for format in kernels.FORMATS}


class Download(NamedTuple):
    """A file that was downloaded and checked."""

    step: Step
    bodies: dict[torch.dtype, tuple[Body, Tensor]]  # by format; uint8


class _ReadingThread(threading.Thread):
    is_over = False  # nobody waits for what it reads


def _is_over() -> bool:
    return getattr(threading.current_thread(), "is_over", False)


class Reader:
    """
    Attributes:
        training: whose versions are taken; None: any one's.
        avoid: paths of files that are damaged, or of another training: routes avoid them.
    """

    def __init__(self, store: Store, key: bytes | None, training: str | None) -> None:
        self._store, self._key, self.training = store, key, training
        self._layouts: dict[str, Layout] = {}
        self._mixed: dict[int, str] = {}  # versions that are none, and why
        self.avoid: set[str] = set()

    @property
    def url(self) -> str:
        return self._store.url

    def choose(self, version: int | None, held: int | None, least: int, wait: float) -> list[Manifest]:
        """The version to go to, the newest one if it is not said. Waits for a newer one than is held.

        -> the manifests of all its publishers

        Args:
            least: the version that was held last; older than this only if that is said.

        Raises:
            NoVersionError: it is not there.
            StaleStoreError: the newest one is older than the one that was held.
            DamagedError, AuthenticationError, OtherTrainingError: a manifest can't be used.
        """
        until, names = monotonic() + wait, self._store.names(FOLDER)
        enough = least if held is None else least + 1
        while True:
            named = complete_versions([name for name in names if f"{FOLDER}/{name}" not in self.avoid])
            there = {found: count for found, count in named.items() if found not in self._mixed}
            goal, left = max(there, default=0) if version is None else version, until - monotonic()
            if goal in there and (left <= 0 or version is not None or goal >= enough):
                if version is None and goal < least:
                    raise StaleStoreError(
                        f"the newest version of {self._store.url} is {goal}, and {least} was held: it is "
                        f"a copy that lags behind, or versions were removed. update({goal}) goes back to it"
                    )
                streams = [Stream(k, there[goal]) for k in range(there[goal])]
                with self.several(partial(self.manifest, goal), streams) as found:
                    manifests = list(found)
                if not (why := why_mixed(manifests)):
                    return manifests
                self._mixed[goal] = why
                logger.warning("version %d is none: %s", goal, why)
            elif left <= 0:
                break
            else:
                names = self._store.wait(FOLDER, names, left)
        there_is = f"there are {min(there)} to {max(there)}" if there else what_is_missing(names)
        which = "no version" if version is None else f"no version {version}"
        mixed = "".join(
            f"; {number} is none: {why}" for number, why in self._mixed.items() if number in named
        )
        raise NoVersionError(f"{self._store.url} has {which}: {there_is}{mixed}")

    @contextmanager
    def several(self, read: Callable[[_Of], _Found], of: Sequence[_Of]) -> Iterator[Iterator[_Found]]:
        """Read something of several publishers. The results come in order; while one is used, threads read
        those that follow."""
        found = deque[Future[_Found]](Future() for _ in of)
        left, readers = deque(zip(found, of, strict=True)), list[_ReadingThread]()

        def work() -> None:
            while True:
                try:
                    future, one = left.popleft()
                except IndexError:
                    return
                try:
                    future.set_result(read(one))
                except BaseException as error:
                    future.set_exception(error)
                del future, one  # an error's traceback would keep them, and they the error

        def results() -> Iterator[_Found]:
            while found:
                yield found.popleft().result()

        threads = min(len(of), self._store.at_once)
        try:
            with suppress(RuntimeError):  # no more threads can be started
                while 1 < threads > len(readers):
                    reader = _ReadingThread(target=work, name="loco-read", daemon=True)
                    reader.start()
                    readers.append(reader)
            yield results() if readers else map(read, of)
        except BaseException as error:
            for reader in readers:
                reader.is_over = True
            left.clear()
            found.clear()  # or errors and threads would keep each other, and what they have read
            until = monotonic() + (_ENDING if isinstance(error, Exception) else 0.0)
            for reader in readers:
                reader.join(max(0.0, until - monotonic()))
            raise
        finally:
            left.clear()

    def manifest(self, version: int, stream: Stream) -> Manifest:
        """
        Raises:
            DamagedError, AuthenticationError, OtherTrainingError: it can't be used.
        """
        manifest = self._load(version, stream)
        if manifest is None:
            raise DamagedError(f"{FOLDER}/{name_of(version, stream)}", "was removed while it was read")
        return manifest

    def find(self, version: int, stream: Stream) -> Manifest | None:
        """A manifest on the way; None if it is gone, or damaged, so that another way must be found."""
        with suppress(DamagedError, AuthenticationError, OtherTrainingError):
            return self._load(version, stream)
        return None

    def _load(self, version: int, stream: Stream) -> Manifest | None:
        try:
            manifest = load_or_none(self._store, version, stream, self._key)
            if manifest is not None and self.training not in (None, manifest.training):
                raise OtherTrainingError(
                    f"{manifest.path} in {self._store.url} is of training {manifest.training}, and "
                    f"{self.training} is followed: make a new Subscriber for another one"
                )
        except (DamagedError, AuthenticationError, OtherTrainingError):
            self._avoid(f"{FOLDER}/{name_of(version, stream)}")
            raise
        return manifest

    def manifests(self, first: Manifest) -> Iterator[Manifest]:
        """Those of one publisher: `first`, that of its anchor, and then the others, the newest first."""
        yield first
        versions = versions_of(self._store.names(FOLDER), first.stream)
        for version in dict.fromkeys([first.anchor, *reversed(versions)]):
            found = self.find(version, first.stream) if version != first.version else None
            if found is not None:
                yield found

    def layout(self, manifest: Manifest) -> Layout:
        digest = manifest.layout
        if digest not in self._layouts:
            path = f"layouts/{digest}.json"
            text = _read(self._store, path, manifest.layout_bytes)
            if digest_of(text) != digest:
                raise DamagedError(path, "is damaged: its SHA-256 is not its name")
            try:
                self._layouts[digest] = Layout.load(text)
            except ValueError as error:
                raise DamagedError(path, f"can't be read: {error}") from error
        return self._layouts[digest]

    def download(self, step: Step) -> Download:
        try:
            return _download(self._store, step)
        except DamagedError as error:
            self._avoid(error.path)
            raise

    def _avoid(self, path: str) -> None:
        if not _is_over():
            self.avoid.add(path)


def _download(store: Store, step: Step) -> Download:
    """
    Raises:
        DamagedError: the file is not there, or is another one.
        OSError: the store can't be read.
    """
    file = step.file
    content = _read(store, file.path, file.bytes)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedError(file.path, "is damaged: its SHA-256 is not what its publisher says")
    raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    bodies, at = {}, 0
    for body in file.bodies:
        if body.format not in _FORMATS:
            raise DamagedError(file.path, f"has a vector of {body.format}, which is no format")
        bodies[_FORMATS[body.format]] = (body, raw[at : at + body.bytes])
        at += body.bytes
    return Download(step, bodies)


def _read(store: Store, path: str, size: int) -> bytearray:
    """
    Raises:
        DamagedError: the file is not there, or has another size. What is too long is not read to its end.
        OSError: the store can't be read.
    """
    content = bytearray()  # grows in place, where joined chunks would be there twice
    try:
        with Progress(logger, f"reading {path}", size, lambda: len(content)):
            for chunk in store.read_chunks(path):
                if _is_over():
                    raise InterruptedError(f"{path} is not wanted any more")
                content += memoryview(chunk)[: size + 1 - len(content)]
                if len(content) > size:
                    break
    except FileNotFoundError as error:
        raise DamagedError(path, "is not there") from error
    if len(content) != size:
        has = f"{len(content)}" if len(content) < size else f"more than {size}"
        raise DamagedError(path, f"has {has} bytes, and was written with {size}")
    return content
