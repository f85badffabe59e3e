"""The inference worker's end: updates its weights to the newest version, in place, bit for bit."""

import os
import threading
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..errors import AuthenticationError
from .decoding import decoded, decoded_slices
from .errors import DamagedError, NotThisVersionError, NoVersionError, OtherTrainingError, SyncError
from .journal import Journal
from .prepared import Part, Prepared
from .reports import Updated
from .storage.stores import open_store
from .versions.manifest import Manifest, Stream, checked_key
from .versions.reader import Download, Reader
from .versions.route import Held, find_route
from .versions.training import checked_training
from .weights.memory import Memory, Target
from .weights.publisher_memory import PublisherMemory


class _Standing(NamedTuple):
    """Which version the weights are. Replaced as a whole, since Ctrl-C may come between any two lines."""

    number: int  # another one whenever the weights change
    least: int = 0  # the version that they were last: only `update(version=…)` goes to an older one
    version: int | None = None  # None: of no version that is known
    held: Mapping[Stream, Held] = MappingProxyType({})
    undo: "_Undo | None" = None


class _Undo(NamedTuple):
    before: _Standing
    memories: dict[Stream, PublisherMemory]
    journal: Journal


class Subscriber:
    """Keeps a model's weights at the versions that a `Publisher` publishes.

        subscriber = loco.sync.Subscriber(model, "file:///shared/weights")
        subscriber.update()                       # to the newest version, in place

    Files are checked against what their publisher said of them before anything is written, and the weights
    against its digest before an update counts: whatever fails, the weights stay what they were. What an
    update overwrites is kept until the next one, which takes memory for the changes alone. Calls from several
    threads wait for each other.

    Where the weights already are a published version's, as in an engine that has loaded the checkpoint that
    training began with, only what changed since is read. Else the first update writes all weights, and can't
    be taken back.

    Args:
        target: a model, or tensors by name: views of the memory that is to change. It must hold just the
            tensors that are published, in their shapes and dtypes. One name may stand for several that share
            memory. For a tensor of which only parts are here, a list of these parts (`EngineSlice`): all of
            it is then kept in host memory, too.
        url: where the versions are: as of `Publisher`, or the http:// address of `python -m loco sync serve`.
        training: the publishers' name for it; no other training's weights are taken. None: of the training
            whose version is the first that is held.
        key: the publishers'.
        token: that the HTTP server asks for. None: the environment variable LOCO_SYNC_TOKEN.
        loaded: the checkpoint that the parts were loaded from: a version that it is need not be read.
    """

    def __init__(
        self,
        target: Target,
        url: str | os.PathLike[str],
        *,
        training: str | None = None,
        key: str | bytes | None = None,
        token: str | None = None,
        loaded: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._memory = Memory.of(target, loaded)
        self._reader = Reader(open_store(url, token), checked_key(key), checked_training(training))
        self._memories: dict[Stream, PublisherMemory] = {}
        self._now = _Standing(0)
        self._turn = threading.RLock()

    @property
    def version(self) -> int | None:
        """That the weights are; None if they are of no version that is known."""
        return self._now.version

    def update(self, version: int | None = None, *, wait: float = 0.0) -> Updated:
        """Make the weights those of a version: `prepare`, then `apply`.

        Args:
            version: also an older one than is held. None: the newest one, which may not be older.
            wait: seconds to wait for a version newer than the one that is held.

        Raises:
            NoVersionError: there is none, or no way leads to it.
            StaleStoreError: the newest one is older than the one that is held.
            OtherTrainingError: it is of another training. The next call takes another version.
            DamagedError: a file is not what its publisher wrote. The next call takes another way.
            NotThisVersionError: something else has written into the weights. The next call writes them all.
            LayoutError: the tensors here are not those that are published.
            AuthenticationError: a manifest was not written by who has the key.
            OSError: the store can't be read.
        """
        return self.apply(self.prepare(version, wait=wait))

    def check(self) -> int | None:
        """See whether what is published are the tensors that are here. Reads no weights.

        -> the newest version; None if there is none that can be used: `update` tells of that

        Raises:
            LayoutError, OSError: as of `update`.
        """
        avoided = set(self._reader.avoid)
        try:
            manifests = self._reader.choose(None, None, 0, 0.0)
            with self._turn:
                self._find_memories(manifests)
        except (NoVersionError, DamagedError, OtherTrainingError, AuthenticationError):
            self._reader.avoid = avoided
            return None
        return manifests[0].version

    def prepare(self, version: int | None = None, *, wait: float = 0.0) -> Prepared:
        """Download, check and decode an update. Writes nothing: the weights may be used meanwhile, but not
        changed.

        Arguments and errors as of `update`.
        """
        begun = perf_counter()
        manifests = self._reader.choose(version, self.version, self._now.least, wait)
        with self._turn:
            memories = self._find_memories(manifests)
            self._recognise(manifests, memories)
            with self._reader.several(self._download, manifests) as downloaded:
                found = zip(manifests, downloaded, strict=True)
                parts = [
                    self._decode(manifest, memories[manifest.stream], files) for manifest, files in found
                ]
            return Prepared(manifests[0].version, self._now.number, parts, perf_counter() - begun)

    def apply(self, prepared: Prepared) -> Updated:
        """Write a prepared update. It counts whole or not at all.

        Raises:
            SyncError: the weights have changed since it was prepared.
            NotThisVersionError: something else has written into the weights.
            DamagedError: what was written has not the publisher's digest. The weights are what they were;
                after a first update they are of no version.
        """
        with self._turn:
            if prepared.state != self._now.number:
                raise SyncError(
                    f"version {prepared.version} was prepared for other weights: they were updated since"
                )
            begun, previous = perf_counter(), self.version
            entries = self._write(prepared)
            self._reader.training = prepared.parts[0].manifest.training
        downloads = [download for part in prepared.parts for download in part.downloads]
        return Updated(
            version=prepared.version,
            previous=previous,
            entries=entries,
            bytes=sum(one.step.file.bytes for one in downloads),
            files=len(downloads),
            seconds={"prepare": prepared.seconds, "apply": perf_counter() - begun},
        )

    def rollback(self) -> int | None:
        """Take the last update back. -> the version that the weights are now

        Raises:
            SyncError: there is nothing to take back: no update yet, or it was the first one, or taken back
                already.
        """
        with self._turn:
            undo = self._now.undo
            if undo is None:
                raise SyncError("there is no update that can be taken back")
            self._now = _Standing(undo.before.number + 1, self._now.least)
            interrupt = undo.journal.restore()
            self._memories = undo.memories
            self._now = undo.before._replace(number=undo.before.number + 1)
            if interrupt is not None:
                raise interrupt
            return self.version

    def verify(self) -> None:
        """Prove that what is in memory is the version that it should be: every weight is read.

        Raises:
            NotThisVersionError: it is not; names the tensors. The next update begins with all weights.
            SyncError: the weights are of no version yet.
        """
        with self._turn:
            if self._now.version is None:
                raise SyncError("the weights are of no version yet: call update() first")
            self._check_memory()

    # ---- the steps of `prepare` ----

    def _find_memories(self, manifests: list[Manifest]) -> dict[Stream, PublisherMemory]:
        """Where each publisher's regions lie here."""
        found = {}
        for manifest in manifests:
            layout, known = self._reader.layout(manifest), self._memories.get(manifest.stream)
            found[manifest.stream] = (
                known if known and known.layout == layout else PublisherMemory(layout, self._memory)
            )
        if found != self._memories:
            self._memory.check_coverage(
                [region for memory in found.values() for region in memory.layout.regions]
            )
        return found

    def _recognise(self, manifests: list[Manifest], memories: dict[Stream, PublisherMemory]) -> None:
        """Find out whether the weights are a version already, if that is not known."""
        held = dict(self._now.held)
        for manifest in manifests:
            mine = memories[manifest.stream]
            if self._memories.get(manifest.stream) is mine and mine.digests:
                continue
            mine.digests = mine.measure()
            held.pop(manifest.stream, None)
            for one in self._reader.manifests(manifest):
                if one.layout == manifest.layout and one.digest == mine.digest:
                    held[manifest.stream] = Held(one.version, one.digest)
                    break
        self._now = self._now._replace(held=held)
        self._memories = memories

    def _download(self, manifest: Manifest) -> list[Download]:
        """The files that lead to a publisher's part of a version."""
        held = self._now.held.get(manifest.stream)
        read = {manifest.version: manifest}

        def manifest_of(version: int) -> Manifest | None:
            if version not in read:
                found = self._reader.find(version, manifest.stream)
                if found is None or found.layout != manifest.layout:
                    return None
                read[version] = found
            return read[version]

        route = find_route(manifest_of, manifest.version, held, self._reader.avoid)
        if route is None:
            lost = f"; damaged: {', '.join(sorted(self._reader.avoid))}" if self._reader.avoid else ""
            raise NoVersionError(f"no way leads to version {manifest.version} of {self._reader.url}{lost}")
        return [self._reader.download(step) for step in route]

    def _decode(self, manifest: Manifest, memory: PublisherMemory, downloads: list[Download]) -> Part:
        if self._now.held.get(manifest.stream) is None and self.version is None:
            return Part(memory, manifest, downloads, None)
        try:
            changes = decoded(memory, downloads)
        except DamagedError as error:
            self._blame(error)
            raise
        return Part(memory, manifest, downloads, changes)

    # ---- the steps of `apply` ----

    def _write(self, prepared: Prepared) -> int:
        """-> the elements written"""
        before, memories = self._now._replace(number=self._now.number + 1, undo=None), self._memories
        can_be_restored = all(part.changes is not None for part in prepared.parts)
        journal = Journal()
        try:
            self._now = _Standing(before.number, before.least)
            entries = sum(self._write_part(part, journal) for part in prepared.parts)
            journal.complete()
            manifests = [part.manifest for part in prepared.parts]
            self._memories = {part.manifest.stream: part.memory for part in prepared.parts}
            held = {manifest.stream: Held(prepared.version, manifest.digest) for manifest in manifests}
            undo = _Undo(before, memories, journal) if can_be_restored else None
            self._now = _Standing(before.number, prepared.version, prepared.version, held, undo)
        except BaseException as error:
            self._now = _Standing(before.number, before.least)
            interrupt = journal.restore()
            self._memories = memories
            if can_be_restored:
                self._now = before
            if isinstance(error, DamagedError):
                self._blame(error)
            if interrupt is not None:
                raise interrupt from error
            raise
        return entries

    def _write_part(self, part: Part, journal: Journal) -> int:
        memory, entries = part.memory, 0
        if part.changes is None:
            for format, first, fresh in decoded_slices(memory, part.downloads):
                memory.write(format, first, fresh)
                entries += fresh.numel()
            memory.digests = memory.measure()
        for format, changes in part.changes or ():
            entries += changes.positions.numel()
            journal.swap_bits(memory, format, changes)
        if memory.digest != part.manifest.digest:
            last = part.downloads[-1].step.file.path if part.downloads else part.manifest.path
            raise DamagedError(
                last, "does not lead to the weights that its publisher had: their digest differs"
            )
        return entries

    # ---- what is in memory ----

    def _blame(self, error: DamagedError) -> None:
        """Avoid a file that leads to wrong weights, unless the weights in memory were wrong before.

        Raises:
            NotThisVersionError: they were.
        """
        if self._now.version is not None or self._now.held:
            self._check_memory()
        self._reader.avoid.add(error.path)

    def _check_memory(self) -> None:
        """
        Raises:
            NotThisVersionError: the weights are not what was held; they are of no version from now on.
        """
        wrong = []
        for memory in self._memories.values():
            for format, found in memory.measure().items():
                expected = zip(memory.layout.of_format(format), found, memory.digests[format], strict=True)
                wrong += [region.name for region, is_, should in expected if is_ != should]
        if wrong:
            versions = {self._now.version, *(held.version for held in self._now.held.values())} - {None}
            self._now, self._memories = _Standing(self._now.number + 1, self._now.least), {}
            named = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise NotThisVersionError(
                f"the weights in memory are not version {max(filter(None, versions))}: {named} differ"
            )
