"""The header of every message: 64 bytes, little-endian, versioned. docs/wire.md gives the same to the byte.

A round's messages are announcements and votes, which are headers alone, and frames: a header and a body,
which holds the entries (or the sums) of one run of elements. A header travels ahead of its body, so that
nothing is received, and no memory taken, for what was not expected.
"""

import ctypes
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from ..errors import WireError

MAGIC = b"LOCO"
VERSION = 4

# magic, version, codec, site, round, status, kind, subject, CRC, numel, entries, body, digest, checksum
_FORMAT = struct.Struct("<4s B B H I H H I I Q Q Q Q Q")
_CRC_AT = 20
HEADER_BYTES = _FORMAT.size
assert HEADER_BYTES == 64


def fp32_bits(value: float) -> int:
    """A number, rounded to FP32, as the integer that travels."""
    return int.from_bytes(bytes(ctypes.c_float(value)), "little")


def fp32_of(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


class Kind(IntEnum):
    """What a header is the header of."""

    ANNOUNCEMENT = 1
    VOTE = 2
    ENTRIES = 3  # of one site, to all
    SLICE = 4  # of one site, to who sums them
    SUMS = 5  # over all sites


class Status(IntEnum):
    """A site's verdict on a round, or whether it could make a frame."""

    OK = 0
    NON_FINITE = 1  # subject: the parameter whose update is infinite or NaN
    REPLICA = 2  # subject: the site whose anchor or round is another than site 0's
    UNREADABLE = 3  # subject: the site whose message could not be read
    SITE_DRIFT = 4  # subject: 0; the ranks of the reporting site hold different weights
    FAILED = 5  # subject: 0; the reporting rank's own error says what
    MISSING = 6  # subject: the site that did not send all, if it gives no reason itself
    OVERFLOW = 7  # subject: 0; the sites' updates add up to an infinite one


@dataclass(frozen=True, kw_only=True)
class Header:
    kind: Kind
    site: int
    round: int
    status: Status = Status.OK
    # Of the status; of a frame its number, from 0; of an announcement its update's norm, as an FP32's bits.
    subject: int = 0
    codec: int = 0  # of a frame's body
    numel: int = 0  # elements that the entries are of
    entries: int = 0
    body_bytes: int = 0  # in an announcement: what the site expects its payload to take
    digest: int = 0  # of the sender's θ before the round
    checksum: int = 0  # of a frame: its body's digest; of an announcement: what the sums may take, in bytes

    def pack(self) -> bytes:
        fields = (
            *(MAGIC, VERSION, self.codec, self.site, self.round, self.status, self.kind, self.subject, 0),
            *(self.numel, self.entries, self.body_bytes, self.digest, self.checksum),
        )
        raw = bytearray(_FORMAT.pack(*fields))
        struct.pack_into("<I", raw, _CRC_AT, zlib.crc32(raw))
        return bytes(raw)

    @staticmethod
    def unpack(raw: bytes) -> "Header":
        if len(raw) != HEADER_BYTES:
            raise WireError(f"a header of {len(raw)} bytes, not {HEADER_BYTES}")
        magic, version, codec, site, round_, status, kind, subject, crc, *sizes = _FORMAT.unpack(raw)
        if magic != MAGIC:
            raise WireError(f"a message that starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"wire version {version}; this site speaks version {VERSION}")
        blank = bytearray(raw)
        struct.pack_into("<I", blank, _CRC_AT, 0)
        if zlib.crc32(blank) != crc:
            raise WireError("a header whose CRC does not match")
        if status not in list(Status) or kind not in list(Kind):
            raise WireError("a header of an unknown kind or status")
        numel, entries, body_bytes, digest, checksum = sizes
        return Header(
            kind=Kind(kind),
            codec=codec,
            site=site,
            round=round_,
            status=Status(status),
            subject=subject,
            numel=numel,
            entries=entries,
            body_bytes=body_bytes,
            digest=digest,
            checksum=checksum,
        )
