"""A store of published weights, as `python -m loco sync` shows it: what it holds, whether it is whole, one of
its versions in memory, and a copy of it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DamagedError, NoVersionError
from .storage.stores import Store, open_store
from .subscriber import Subscriber
from .versions.manifest import (
    FOLDER,
    WEIGHTS,
    Manifest,
    Stream,
    checked_key,
    complete_versions,
    what_is_missing,
)
from .versions.reader import Reader
from .versions.route import Step
from .versions.training import MOST_BYTES, PATH

_LAYOUTS = "layouts"


@dataclass(frozen=True)
class Version:
    """A version that is whole.

    manifests: of all its publishers.
    """

    manifests: tuple[Manifest, ...]

    @property
    def number(self) -> int:
        return self.manifests[0].version

    @property
    def is_anchor(self) -> bool:
        return all(manifest.file(None) is not None for manifest in self.manifests)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for manifest in self.manifests for file in manifest.files)

    @property
    def changed(self) -> int | None:
        """The elements that have changed since the version before; None if no patch leads from there."""
        patches = [manifest.file(self.number - 1) for manifest in self.manifests]
        found = [patch for patch in patches if patch is not None]
        if len(found) < len(patches):
            return None
        return sum(body.entries for patch in found for body in patch.bodies)


class Archive:
    """
    Args:
        url, key, token: as of `Subscriber`.

    Raises:
        ValueError: the URL or the key is none.
    """

    def __init__(self, url: str | os.PathLike[str], *, key: bytes | None = None, token: str | None = None):
        self._url, self._key, self._token = os.fspath(url), key, token
        self._store: Store = open_store(url, token)
        self._reader = Reader(self._store, checked_key(key), None)

    def versions(self) -> list[Version]:
        """All that are whole, the oldest first.

        Raises:
            NoVersionError: there is none.
            DamagedError, AuthenticationError: a manifest can't be used.
            OSError: the store can't be read.
        """
        names = self._store.names(FOLDER)
        named = complete_versions(names)
        if not named:
            raise NoVersionError(f"{self._store.url} has no version: {what_is_missing(names)}")
        return [
            Version(tuple(self._reader.manifest(number, Stream(k, count)) for k in range(count)))
            for number, count in named.items()
        ]

    def tensors(self, version: int | None = None, *, wait: float = 0.0) -> tuple[int, dict[str, Tensor]]:
        """A version, by default the newest, in fresh memory. -> its number, and the weights by name

        Args:
            wait: seconds to wait for it.

        Raises:
            NoVersionError, DamagedError, AuthenticationError, OSError: as of `Subscriber.update`.
        """
        manifests = self._reader.choose(version, None, 0, wait)
        weights = self._blank(manifests)
        return self._subscriber(weights).update(manifests[0].version).version, weights

    def layout(self, version: Version) -> dict[str, Tensor]:
        """The tensors of a version, without their elements."""
        return self._blank(version.manifests, device="meta")

    def verify(self, told: Callable[[str], object]) -> Iterator[str]:
        """Read every file, and bring memory to every version in turn. -> what is damaged

        Args:
            told: which version is read, before it is.
        """
        weights: dict[str, Tensor] | None = None
        subscriber: Subscriber | None = None
        for version in self.versions():
            told(f"version {version.number}, {version.bytes / 1e6:,.1f} MB")
            for manifest in version.manifests:
                for file in manifest.files:
                    try:
                        self._reader.download(Step(manifest, file))
                    except DamagedError as error:
                        yield str(error)
            if weights is None or not _fit(self.layout(version), weights):
                weights = self._blank(version.manifests)
                subscriber = self._subscriber(weights)
            assert subscriber is not None
            try:
                subscriber.update(version.number)
            except (DamagedError, NoVersionError) as error:
                yield f"version {version.number}: {error}"

    def copy_to(self, url: str, told: Callable[[str], object]) -> int:
        """Copy what another store lacks, the manifests last. -> the files that were copied

        Raises:
            ValueError: it holds another training.
        """
        there = open_store(url, self._token)
        self._copy_training(there)
        versions = self.versions()
        wanted = {file.path for one in versions for manifest in one.manifests for file in manifest.files}
        layouts = {f"{_LAYOUTS}/{manifest.layout}.json" for one in versions for manifest in one.manifests}
        held = {f"{folder}/{name}" for folder in (_LAYOUTS, WEIGHTS, FOLDER) for name in there.names(folder)}
        manifests = [manifest.path for one in versions for manifest in one.manifests]
        missing = [path for path in [*sorted(layouts), *sorted(wanted), *manifests] if path not in held]
        for path in missing:
            told(path)
            there.write_chunks(path, self._store.read_chunks(path))
        return len(missing)

    def _copy_training(self, there: Store) -> None:
        """Its identity, which a training that was given a name has not."""
        mine, theirs = (_read_or_none(store, PATH) for store in (self._store, there))
        if theirs is not None and theirs != mine:
            raise ValueError(f"{there.url} holds the versions of another training: take another folder")
        if mine is not None and theirs is None:
            there.write(PATH, mine)

    def _subscriber(self, weights: Mapping[str, Tensor]) -> Subscriber:
        return Subscriber(weights, self._url, key=self._key, token=self._token)

    def _blank(self, manifests: Sequence[Manifest], device: str = "cpu") -> dict[str, Tensor]:
        """Memory for all tensors of a version."""
        regions = [region for manifest in manifests for region in self._reader.layout(manifest).regions]
        return {r.name: torch.zeros(r.shape, dtype=r.dtype, device=device) for r in regions}


def _read_or_none(store: Store, path: str) -> bytes | None:
    try:
        return store.read(path, MOST_BYTES)
    except FileNotFoundError:
        return None


def _fit(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return {name: (t.shape, t.dtype) for name, t in some.items()} == {
        name: (t.shape, t.dtype) for name, t in others.items()
    }
