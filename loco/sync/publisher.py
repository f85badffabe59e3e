"""The trainer's end: publishes versions of its weights, each as little more than what changed."""

import logging
import math
import os
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from .reports import Published, warned_of_many_changes
from .share import SitePosition
from .storage.stores import open_store
from .versions.anchors import anchor_bytes, pack_anchor
from .versions.history import History, Packed, packed
from .versions.layout import Layout
from .versions.manifest import Manifest, checked_key
from .versions.route import bytes_of, find_route
from .versions.training import checked_training
from .versions.vectors import ChangesOf, Vectors
from .versions.writer import Writer
from .weights.source import Source
from .weights.tensors import DtypeOf, Named

logger = logging.getLogger(__name__)
HISTORY_BYTES = 0.4  # a weight: what the patches over several versions are made of
ANCHOR_SHARE = 0.5  # of an anchor's bytes: what a newcomer may have to read beside it
DENSE_SHARE = 0.4  # of the bytes in memory: from here on an anchor may take less than a patch


class Publisher:
    """Publishes a model's weights, version by version, for `Subscriber`s.

        publisher = loco.sync.Publisher(model, "file:///shared/weights")
        publisher.publish()                       # after a step or a round

    A subscriber that has the last version reads what changed; one that missed some their patches, or patches
    over 8, 16, 32 … versions; a new one all weights (an anchor) and the patches since. The weights of a
    subscriber are those of the publisher, bit for bit. The publisher keeps a copy of the weights as they were
    published last, in host memory, and at most half a byte a weight beside it.

    Args:
        source: a model, tensors by name, or a function that returns them (`fp8_checkpoint`); read anew for
            each version. Of a DTensor the part that this process holds is published: no shard is gathered.
        url: where versions go: a path, any URL of fsspec's (s3://, gs://, …), or the http:// address of
            `python -m loco sync serve DIR --writable`. Nothing else may lie there.
        dtype: what receivers hold for FP32 tensors, or a function of name and tensor that says it. Other
            tensors are published as they are.
        stream: (k, n) for the k-th of n publishers that share the work, each with shards of its own. Tensors
            that are no DTensors are divided among them: all n must hold the same, which each proves by a
            digest of all of them. All must publish the same versions. Or an optimizer's topology: every rank
            of every site publishes, after rounds, when all hold the same weights; shards that each site has
            are divided among the sites, too.
        training: a name that subscribers can ask for: they take no other training's weights. None: one that
            is drawn where the store is empty, and is then kept in it.
        key: shared with the subscribers, at least 16 bytes: what anybody else writes is then refused.
        keep: versions after which a subscriber that stays behind may have to begin with an anchor.
        anchor_every: versions. None: when a newcomer would have to read half as much again beside the anchor.
        skips: bytes of patches over eight versions and more, as a share of the bytes of all others.
        token: that the HTTP server asks for. None: the environment variable LOCO_SYNC_TOKEN.

    Raises:
        ValueError: an argument is out of range, or a tensor can't be published.
    """

    def __init__(
        self,
        source: Named,
        url: str | os.PathLike[str],
        *,
        dtype: DtypeOf = torch.bfloat16,
        stream: tuple[int, int] | SitePosition = (0, 1),
        training: str | None = None,
        key: str | bytes | None = None,
        keep: int = 128,
        anchor_every: int | None = None,
        skips: float = 0.25,
        token: str | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        if anchor_every is not None and anchor_every < 1:
            raise ValueError(f"anchor_every must be >= 1, or None, got {anchor_every}")
        if not 0 <= skips < math.inf:
            raise ValueError(f"skips must be >= 0 and finite, got {skips}")
        self._keep, self._anchor_every, self._skips = keep, anchor_every, skips
        self._source = Source(source, dtype, stream)
        self.stream = self._source.share.stream
        self._source.read()  # refuses now what can't be published
        self._writer = Writer(
            open_store(url, token), self.stream, checked_key(key), checked_training(training)
        )
        self._run = uuid.uuid4().hex
        self._weights: Vectors | None = None  # as they were published last
        self._history = History(0, 0.0)
        self._manifests: dict[int, Manifest] = {}  # of the versions of this run that are there
        self._since_anchor = 0  # versions
        self._has_warned = False
        self._last: Published | None = None
        self._turn = threading.RLock()
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def version(self) -> int | None:
        """The last one that this publisher has published, or None."""
        return max(self._manifests, default=None)

    def publish(self, version: int | None = None, *, wait: bool = True) -> Published:
        """Publish the weights as they are now. They may not change until it returns. Of several threads, one
        publishes after the other.

        Args:
            version: larger than the last one. None: the last one in the store, plus one. Several publishers
                must say it.
            wait: False: return as soon as the changes are found and coded. The next `publish`, `flush` or
                `close` waits until they are in the store, and raises what went wrong.

        Raises:
            TakenOverError: somebody else publishes here.
            MixedVersionError: another publisher has published other weights as this version, or did so in an
                attempt that has ended. The next version goes on.
            OSError: the store can't be written. This version does not exist, unless the store failed in a way
                that does not tell; the next one will be an anchor.
        """
        with self._turn:
            self.flush()
            if (settled := self._writer.settle()) is not None:
                self._is_there(settled)
            chosen, follows = self._writer.begin(version, self.version)
            try:
                return self._publish(chosen, follows, wait)
            except BaseException:
                self._weights = None  # they may be half of a version, or one that is not there
                raise

    def flush(self) -> Published | None:
        """Wait until what was published is in the store. -> the report of the last version

        Raises:
            TakenOverError, MixedVersionError, OSError: as of `publish`.
        """
        with self._turn:
            if self._writing is not None:
                with suppress(RuntimeError):  # Ctrl-C came before it had started
                    self._writing.join()
                self._writing = None
            if self._failed is not None:
                failed, self._failed, self._weights = self._failed, None, None
                raise failed
            return self._last

    def close(self) -> None:
        """`flush`, and let go of the copy of the weights."""
        try:
            self.flush()
        finally:
            self._weights = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def after(self, optimizer: Any, *, wait: bool = True) -> RemovableHandle:
        """Publish θ, cast, after each round of a `PulseLoCo`, a `DiLoCo` or what `loco.attach` returns.
        `remove()` on what it returns ends that.

        Call it once, before a checkpoint is loaded or after. The version is the number of the round; where
        that one or later ones are published already, as by the run that is resumed, they go on from there.
        Several publishers must all call this before the next round.

        The round counts on all sites when it is published. So a version that can't be published does not
        raise; it is logged as an error.
        """
        newest, ahead = self._writer.newest(), -1

        def publish(report: Any) -> None:
            nonlocal ahead
            if ahead < 0:
                ahead = max(newest + 1 - report.round, 0)
            with suppress(Exception):  # of an earlier round; logged already
                self.flush()
            # Where rounds overlap, the weights are this site's own at any time.
            overlaps = optimizer.settings.overlap is not None
            try:
                if overlaps:
                    optimizer.eval()
                self.publish(report.round + ahead, wait=wait)
            except Exception:
                logger.exception("the weights after round %d were not published", report.round)
            finally:
                if overlaps:
                    optimizer.train()

        return optimizer.register_report_hook(publish)

    # ---- a version ----

    def _publish(self, version: int, follows: bool, wait: bool) -> Published:
        begun = perf_counter()
        source = self._source.read()
        layout, ties = source.layout, source.ties() if self.stream.count > 1 else {}
        last = self._manifests[max(self._manifests)] if self._manifests else None
        reason = self._why_anchor(layout, follows)
        if reason:
            logger.log(
                logging.WARNING if last else logging.INFO, "version %d is an anchor: %s", version, reason
            )
            self._weights = None  # so that there are never two copies
            weights = self._weights = Vectors(layout, source.pieces)
            self._history = History(int(HISTORY_BYTES * layout.numel), self._skips)
            changes, patch, found = ChangesOf(), None, perf_counter()
        else:
            assert self._weights is not None
            weights = self._weights
            changes = weights.changes(source.pieces)
            found = perf_counter()
            patch = packed(weights, changes)
            weights.swap_bits(changes)  # from now on `changes` takes the step back
        coded = perf_counter()
        entries = sum(patch.entries.values()) if patch else layout.numel
        report = Published(
            version=version,
            reason=reason,
            entries=entries,
            numel=layout.numel,
            patch_bytes=patch.bytes if patch else 0,
            dense_bytes=layout.nbytes,
            seconds={"find": found - begun, "pack": coded - found},
        )
        self._has_warned = self._has_warned or warned_of_many_changes(report)
        if wait:
            return self._write(report, weights, ties, last, patch, changes)
        arguments = (report, weights, ties, last, patch, changes)
        self._writing = threading.Thread(target=self._try_to_write, args=arguments, name="loco-publish")
        self._writing.start()
        return report

    def _why_anchor(self, layout: Layout, follows: bool) -> str:
        if not self._manifests:
            return "it is this publisher's first"
        if not follows:
            return f"the version before it, {self.version}, is no longer in the store"
        if self._weights is None:
            return "the version before it could not be published"
        if self._weights.layout != layout:
            return f"the tensors are others than before: {self._weights.layout.difference(layout)}"
        return ""

    def _try_to_write(self, report: Published, *arguments: Any) -> None:
        try:
            self._write(report, *arguments)
        except BaseException as error:  # `flush` raises it
            logger.error("version %d was not published: %s", report.version, error)
            self._failed = error

    def _write(
        self,
        report: Published,
        weights: Vectors,
        ties: dict[str, str],
        last: Manifest | None,
        patch: Packed | None,
        undo: ChangesOf,
    ) -> Published:
        """Remove what nobody will need any more from the store, and write a version."""
        begun = perf_counter()
        self._writer.remove_old(self._keep, self._manifests)
        try:
            manifest, patches, said = self._write_files(report.version, weights, ties, last, patch, undo)
        except BaseException:
            self._writer.discard()
            raise
        self._is_there(manifest)
        self._last = replace(
            report,
            patch_bytes=manifest.files[0].bytes if not patches else patches[0][2].bytes,
            bytes=sum(file.bytes for file in manifest.files) + said,
            skips=tuple(base for base, _, _ in patches[1:]),
            seconds={**report.seconds, "write": perf_counter() - begun},
        )
        return self._last

    def _is_there(self, manifest: Manifest) -> None:
        self._manifests[manifest.version] = manifest
        self._since_anchor = 0 if manifest.anchor == manifest.version else self._since_anchor + 1

    def _write_files(
        self,
        version: int,
        weights: Vectors,
        ties: dict[str, str],
        last: Manifest | None,
        patch: Packed | None,
        undo: ChangesOf,
    ) -> tuple[Manifest, list[tuple[int, str, Packed]], int]:
        """Everything of a version, the manifest last. -> it, the patches, and the manifest's bytes"""
        digest = weights.digest
        patches: list[tuple[int, str, Packed]] = []
        if patch is not None:
            assert last is not None
            patches.append((last.version, last.digest, patch))
            patches += self._history.add(weights, undo, last, version, patch.bytes)
            dense = DENSE_SHARE * weights.layout.nbytes
            if patch.bytes > dense and anchor_bytes(weights.whole.values()) <= patch.bytes:
                patches.clear()  # nobody is better off with them
        files = []
        has_anchor = not patches or self._is_anchor_due(last, patches)
        if has_anchor:
            self._writer.layout(weights.layout)  # also where it is there already: it may have been damaged
            files.append(self._writer.file(version, {f: pack_anchor(w) for f, w in weights.whole.items()}))
        for base, base_digest, some in patches:
            files.append(
                self._writer.file(
                    version, some.chunks(), base=base, base_digest=base_digest, entries=some.entries
                )
            )
        manifest = Manifest(
            version=version,
            index=self.stream.index,
            count=self.stream.count,
            run=self._run,
            training=self._writer.training,
            ties=ties,
            layout=weights.layout.digest,
            layout_bytes=len(weights.layout.text),
            digest=digest,
            anchor=version if has_anchor or last is None else last.anchor,
            files=tuple(files),
        )
        return manifest, patches, self._writer.commit(manifest)

    def _is_anchor_due(self, last: Manifest | None, patches: list[tuple[int, str, Packed]]) -> bool:
        if last is None or not patches:
            return False
        if self._anchor_every is not None:
            return self._since_anchor + 1 >= self._anchor_every
        route = find_route(self._manifests.get, last.version, None, ())
        if route is None:
            return True
        beside = bytes_of(route) - route[0].file.bytes + patches[0][2].bytes
        return beside > ANCHOR_SHARE * route[0].file.bytes
