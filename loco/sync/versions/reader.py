"""What a subscriber reads in a store, and what it has found damaged there."""

import hashlib
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from loco import kernels

from ...errors import AuthenticationError
from ..errors import DamagedError, NoVersionError
from ..storage.stores import Store
from .layout import Layout, digest_of
from .manifest import FOLDER, Body, Manifest, Stream, complete_versions, load_or_none, name_of
from .retention import versions_of
from .route import Step


class Download(NamedTuple):
    """A file that is what its publisher wrote."""

    step: Step
    bodies: dict[torch.dtype, tuple[Body, Tensor]]  # by format; uint8


class Reader:
    """
    Attributes:
        avoid: paths of files that are not what their publishers wrote. Other ways are found.
    """

    def __init__(self, store: Store, key: bytes | None) -> None:
        self._store, self._key = store, key
        self._layouts: dict[str, Layout] = {}
        self.avoid: set[str] = set()

    @property
    def url(self) -> str:
        return self._store.url

    def choose(self, version: int | None, held: int | None, wait: float) -> tuple[int, int]:
        """The version to go to, the newest one if it is not said. Waits for another one than is held.

        -> the version, and how many publishers it has

        Raises:
            NoVersionError: it is not there.
        """
        until, names = monotonic() + wait, self._store.names(FOLDER)
        while True:
            there = complete_versions([name for name in names if f"{FOLDER}/{name}" not in self.avoid])
            newest = max(there, default=None)
            goal = newest if version is None else version if version in there else None
            left = until - monotonic()
            if left <= 0 or (goal is not None and (version is not None or goal != held)):
                break
            names = self._store.wait(FOLDER, names, left)
        if goal is None:
            there_is = f"there are {min(there)} to {newest}" if there else "nothing is published there"
            which = "no version" if version is None else f"no version {version}"
            raise NoVersionError(f"{self._store.url} has {which}: {there_is}")
        return goal, there[goal]

    def manifest(self, version: int, stream: Stream) -> Manifest:
        """
        Raises:
            DamagedError, AuthenticationError: it can't be read.
        """
        path = f"{FOLDER}/{name_of(version, stream)}"
        try:
            manifest = load_or_none(self._store, version, stream, self._key)
        except (DamagedError, AuthenticationError):
            self.avoid.add(path)
            raise
        if manifest is None:
            raise DamagedError(path, "was removed while it was read")
        return manifest

    def find(self, version: int, stream: Stream) -> Manifest | None:
        """A manifest on the way; None if it is gone, or damaged, so that another way must be found."""
        try:
            return load_or_none(self._store, version, stream, self._key)
        except (DamagedError, AuthenticationError):
            self.avoid.add(f"{FOLDER}/{name_of(version, stream)}")
            return None

    def manifests(self, first: Manifest) -> Iterator[Manifest]:
        """Those of one publisher: `first`, that of its anchor, and then the others, the newest first."""
        yield first
        versions = versions_of(self._store.names(FOLDER), first.stream)
        for version in dict.fromkeys([first.anchor, *reversed(versions)]):
            found = self.find(version, first.stream) if version != first.version else None
            if found is not None:
                yield found

    def layout(self, digest: str) -> Layout:
        if digest not in self._layouts:
            path = f"layouts/{digest}.json"
            try:
                text = self._store.read(path)
            except FileNotFoundError as error:
                raise DamagedError(path, "is not there") from error
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
            self.avoid.add(error.path)
            raise


def _download(store: Store, step: Step) -> Download:
    """
    Raises:
        DamagedError: the file is not there, or is another one.
        OSError: the store can't be read.
    """
    file = step.file
    try:
        content = store.read(file.path)
    except FileNotFoundError as error:
        raise DamagedError(file.path, "is not there") from error
    if len(content) != file.bytes:
        raise DamagedError(file.path, f"has {len(content)} bytes, and was written with {file.bytes}")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedError(file.path, "is damaged: its SHA-256 is not what its publisher says")
    bodies, at = {}, 0
    raw = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )
    for body in file.bodies:
        format = getattr(torch, body.format, None)
        if format not in kernels.FORMATS:
            raise DamagedError(file.path, f"has a vector of {body.format}, which is no format")
        bodies[format] = (body, raw[at : at + body.bytes])
        at += body.bytes
    return Download(step, bodies)
