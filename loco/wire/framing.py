"""Frames: the entries of runs of elements, each coded on its own, so that coding and sending overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import BLOCK, Entries, Known
from loco.kernels.recycle import recycled

from ..errors import WireError
from .codecs import CODECS, Codec
from .records import RECORD_BYTES, FrameHeader, Kind

LEAST, MOST = 1 << 20, 1 << 23  # elements: some 300 kB to 2.4 MB at a density of 6%
FEW, MANY = 8, 32  # frames
_HOST = torch.device("cpu")


class Frame(NamedTuple):
    header: FrameHeader
    body: Tensor  # uint8, in host memory
    whole: Tensor | None = None  # if the body has its header in front of it

    def in_one_piece(self) -> Tensor:
        if self.whole is not None:
            return self.whole
        return torch.cat([torch.frombuffer(bytearray(self.header.pack()), dtype=torch.uint8), self.body])


@dataclass(frozen=True)
class Frames:
    """How a run of `width` elements is cut, so that coding and sending overlap. Each frame costs about a
    millisecond, and perhaps a network's latency, so there are FEW; but those on their way take memory, so
    that there are MANY of a long run, and none has more than MOST elements."""

    size: int  # elements
    count: int

    @staticmethod
    def of(width: int) -> "Frames":
        few, many = (-(-width // (count * LEAST)) * LEAST for count in (FEW, MANY))
        size = max(min(few, max(2 * LEAST, many), MOST), LEAST)
        return Frames(size, -(-width // size))

    def span(self, of: slice, number: int) -> slice:
        """The elements of one frame of a slice; none, if the slice ends before it."""
        first = min(of.start + number * self.size, of.stop)
        return slice(first, min(first + self.size, of.stop))


def slices_of(numel: int, sites: int) -> list[slice]:
    """The elements that each site sums: whole blocks, equally many but for the last ones."""
    width = -(-numel // (BLOCK * sites)) * BLOCK
    return [slice(min(k * width, numel), min((k + 1) * width, numel)) for k in range(sites)]


class Framing:
    """Turns entries into this round's frames, and the peers' frames into entries.

    Args:
        site: this one's number.
        codec: of this site's frames; a peer may use another.
        known: θ, m and the gate before the round, of all elements.
        round: its number.
        digest: of θ.
    """

    def __init__(self, site: int, codec: Codec, known: Known, *, round: int, digest: int) -> None:
        self.site = site
        self.codec = codec
        self.known = known
        self.round = round
        self.digest = digest
        self._in_host_memory: dict[tuple[int, int], Known] = {}
        self.coded_entries = 0  # of this site's, in frames
        self.coded_bytes = 0  # which took so many, headers included

    def seal(self, entries: Entries, at: slice, number: int, kind: Kind) -> Frame:
        """A frame of the entries of the elements `at`."""
        codec, numel = self.codec, at.stop - at.start
        ahead = 0 if codec.sizes_are_known else RECORD_BYTES
        while (whole := codec.encode(entries, self._known(at, codec), ahead)) is None:
            assert codec.fallback is not None
            codec = codec.fallback
        body = whole[ahead:]
        header = FrameHeader(
            kind=kind,
            codec=codec.id,
            site=self.site,
            round=self.round,
            number=number,
            numel=numel,
            entries=entries.length if ahead else numel,
            body_bytes=body.numel(),
            digest=self.digest,
            checksum=kernels.digest(body),
        )
        if kind != Kind.SUMS:
            self.coded_entries += header.entries
            self.coded_bytes += RECORD_BYTES + body.numel()
        whole = whole.cpu()
        if not ahead:
            return Frame(header, whole)
        whole.numpy().data[:ahead] = header.pack()
        return Frame(header, whole[ahead:], whole)

    @property
    def sizes_are_known(self) -> bool:
        """Before any header is read: all sites send all elements in one codec."""
        return self.codec.sizes_are_known

    def room(self, at: slice) -> Tensor:
        """For the body of a frame of these elements, where sizes are known."""
        numel = at.stop - at.start
        return recycled(self.codec.most_bytes(numel, numel), torch.uint8, _HOST)

    def most_rooms(self, count: int) -> Sequence[Tensor]:
        """For any frames of this vector in one piece, of any codec. Only the pages that are written take
        memory."""
        numel = self.known.numel
        numel = min(numel, Frames.of(numel).size)
        most = max(codec.most_bytes(numel, numel) for codec in CODECS.values())
        # In whole records, so that each room, and the values in it, begin at a multiple of four.
        size = RECORD_BYTES * (1 + -(-most // RECORD_BYTES))
        return recycled(count * size, torch.uint8, _HOST, at_most=True).split(size)

    def failed(self, at: slice, number: int, kind: Kind) -> Frame:
        """In the place of a frame that this site can't make; its vote will say why. The peers wait for a body
        whose size they know, whatever it holds."""
        header = FrameHeader(
            kind=kind,
            site=self.site,
            round=self.round,
            number=number,
            is_missing=True,
            digest=self.digest,
        )
        return Frame(header, self.room(at if self.sizes_are_known else slice(0, 0)))

    def check(self, header: FrameHeader, site: int, at: slice, number: int, kind: Kind) -> None:
        """Refuse a header that is not of the frame that comes next, before memory is taken for its body.

        Raises:
            WireError: it is of another site, round, model, or place, or announces what no such frame holds.
        """
        mine = (kind, site, self.round, number, self.digest)
        if (header.kind, header.site, header.round, header.number, header.digest) != mine:
            got = f"{header.kind.name} {header.number} of site {header.site}, round {header.round}"
            want = f"{kind.name} {number} of site {site}, round {self.round}"
            raise WireError(
                f"a header of {got}, θ {header.digest:016x} in the place of {want}, θ {self.digest:016x}"
            )
        if header.is_missing and not header.body_bytes:
            return
        codec, numel = CODECS.get(header.codec), at.stop - at.start
        # Which codec of entries it uses, each site chooses.
        if codec is None or (
            codec is not self.codec and (codec.sizes_are_known or self.codec.sizes_are_known)
        ):
            raise WireError(f"a frame of codec {header.codec}")
        if header.is_missing:
            raise WireError(f"a frame that is said to be missing, of {header.body_bytes} bytes")
        if header.numel != numel:
            raise WireError(f"a frame of {header.numel} elements, not {numel}")
        if header.entries > numel or header.body_bytes > codec.most_bytes(header.entries, numel):
            raise WireError(f"a frame of {header.body_bytes} bytes for {header.entries} of {numel} entries")

    def open(self, header: FrameHeader, body: Tensor, at: slice) -> Entries | None:
        """The entries of a frame whose header has passed `check`; None of one that its sender could not make.

        Raises:
            WireError: the body is damaged or malformed.
        """
        if header.is_missing:
            return None
        body = body.to(self.known.device)
        if kernels.digest(body) != header.checksum:
            raise WireError("a body whose checksum does not match")
        codec = CODECS[header.codec]
        return codec.decode(body, header.entries, self._known(at, codec))

    def as_received(self, entries: Entries, at: slice) -> Entries:
        """This site's own entries as all others will read them."""
        if self.codec.exact and (entries.starts is None) == self.sizes_are_known:
            return entries
        known = self.known.part(at)
        body = self.codec.encode(entries, known)
        assert body is not None
        return self.codec.decode(body, known.numel, known)

    def _known(self, at: slice, codec: Codec) -> Known:
        """What a codec is told of the elements `at`."""
        part = self.known.part(at)
        if not codec.known_on_host or part.device.type == "cpu":
            return part
        # Copied from a GPU once for all sites' frames of the same elements; few are worked on at a time.
        kept, key = self._in_host_memory, (at.start, at.stop)
        if key not in kept:
            while len(kept) >= 4:
                kept.pop(next(iter(kept)))
            kept[key] = part.to("cpu")
        return kept[key]
