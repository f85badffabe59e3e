"""What the sites say to each other in a round, beside the entries: three records, little-endian, versioned.

An announcement opens the round, or in its place a vote against it; a frame header stands before the body of
its frame and says what it must be; and a vote closes the round. All are 64 bytes long, so that a rank at
another point of the round than its peer reads a record of another kind, and gets an error that says so.
docs/wire.md gives the same to the byte.
"""

import ctypes
import struct
import zlib
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import ClassVar, Self

from ..errors import WireError

MAGIC = b"LOCO"
VERSION = 11

# magic, version, kind, site, round, CRC
_OPENING = struct.Struct("<4s B B H I I")
KIND_AT, _CRC_AT = 5, 12
RECORD_BYTES = 64


def fp32_bits(value: float) -> int:
    """A number, rounded to FP32, as the integer that travels."""
    return int.from_bytes(bytes(ctypes.c_float(value)), "little")


def fp32_of(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


class Kind(IntEnum):
    """What a message is."""

    ANNOUNCEMENT = 1
    VOTE = 2
    # Frames:
    ENTRIES = 3  # of one site, to all
    SLICE = 4  # of one site, to who sums them
    SUMS = 5  # over all sites


class Status(IntEnum):
    """A site's verdict on a round."""

    OK = 0
    NON_FINITE = 1  # subject: the parameter whose update is infinite or NaN
    REPLICA = 2  # subject: the site whose anchor or round is another than site 0's
    UNREADABLE = 3  # subject: the site whose message could not be read
    SITE_DRIFT = 4  # subject: 0; the ranks of the reporting site hold different weights
    FAILED = 5  # subject: 0; the reporting rank's own error says what
    MISSING = 6  # subject: the site that did not send all, if it gives no reason itself
    OVERFLOW = 7  # subject: 0; the sites' updates add up to an infinite one


@dataclass(frozen=True, kw_only=True)
class Record:
    """An opening of 16 bytes, the same for all kinds, and the numbers of its own kind."""

    KINDS: ClassVar[tuple[Kind, ...]]
    NUMBERS: ClassVar[struct.Struct]  # the fields after these three, in their order

    kind: Kind
    site: int
    round: int

    def pack(self) -> bytes:
        kind, site, round_, *numbers = vars(self).values()  # in the fields' order
        opening = _OPENING.pack(MAGIC, VERSION, kind, site, round_, 0)
        raw = opening + self.NUMBERS.pack(*numbers)
        return raw[:_CRC_AT] + _crc_of(raw).to_bytes(4, "little") + raw[_CRC_AT + 4 :]

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """
        Raises:
            WireError: it is damaged, of another version, or of another kind than this class.
        """
        if len(raw) != RECORD_BYTES:
            raise WireError(f"a record of {len(raw)} bytes, not {RECORD_BYTES}")
        magic, version, kind, site, round_, crc = _OPENING.unpack_from(raw)
        if magic != MAGIC:
            raise WireError(f"a message that starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"wire version {version}; this site speaks version {VERSION}")
        if _crc_of(raw) != crc:
            raise WireError("a record whose CRC does not match")
        if kind not in cls.KINDS:
            expected = " or ".join(kind.name.lower() for kind in cls.KINDS)
            raise WireError(f"a record of kind {kind} in the place of {expected}")
        values = (Kind(kind), site, round_, *cls.NUMBERS.unpack_from(raw, _OPENING.size))
        record = cls.__new__(cls)  # as by __init__, which takes three times as long
        vars(record).update(zip(_names(cls), values, strict=True))
        return record


@dataclass(frozen=True, kw_only=True)
class Announcement(Record):
    """What a site tells all others before its entries travel.

    codec: of its frames.
    codec_time_ratio: how long an entry takes in one codec, over another (`exchange/codec_choice.py`).
    enclosed_bytes: of the frame of all its entries, if they are few and follow in the same message; else 0.
    norm_bits: its update's norm, as an FP32's bits.
    weight_bits: that site's weight, as an FP32's bits.
    sums_bits: the bytes that it expects the sums over all sites to take, as an FP32's bits.
    numel: elements of the vector.
    entries: that it will send.
    payload_bytes: what it expects them to take.
    digest: of its θ before the round.
    """

    KINDS = (Kind.ANNOUNCEMENT,)
    NUMBERS = struct.Struct("<B b H I I I Q Q Q Q")

    kind: Kind = Kind.ANNOUNCEMENT
    codec: int = 0
    codec_time_ratio: int = 0
    enclosed_bytes: int = 0
    norm_bits: int = 0
    weight_bits: int = fp32_bits(1.0)
    sums_bits: int = 0
    numel: int = 0
    entries: int = 0
    payload_bytes: int = 0
    digest: int = 0


@dataclass(frozen=True, kw_only=True)
class Vote(Record):
    """Against a round, in the place of an announcement; or for or against it, once all entries have arrived.

    subject: of the status.
    numel, entries, sent_bytes: what this rank has had to exchange, and what it sent of it to the other sites
        before this vote; 0 in the place of an announcement.
    """

    KINDS = (Kind.VOTE,)
    NUMBERS = struct.Struct("<B 3x I Q Q Q 16x")

    kind: Kind = Kind.VOTE
    status: Status = Status.OK
    subject: int = 0
    numel: int = 0
    entries: int = 0
    sent_bytes: int = 0

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        vote = super().unpack(raw)
        try:
            vars(vote)["status"] = Status(vote.status)
        except ValueError as error:
            raise WireError(f"a vote of the unknown status {vote.status}") from error
        return vote


@dataclass(frozen=True, kw_only=True)
class FrameHeader(Record):
    """
    codec: of the body.
    is_missing: its sender could not make the frame; a body that is sent nevertheless means nothing.
    number: of the frame, from 0.
    numel: elements that the frame is of.
    entries: that it holds.
    digest: of the sender's θ before the round.
    checksum: the body's digest.
    """

    KINDS = (Kind.ENTRIES, Kind.SLICE, Kind.SUMS)
    NUMBERS = struct.Struct("<B ? 2x I Q Q Q Q Q")

    codec: int = 0
    is_missing: bool = False
    number: int
    numel: int = 0
    entries: int = 0
    body_bytes: int = 0
    digest: int = 0
    checksum: int = 0


def _crc_of(raw: bytes) -> int:
    """Of a record whose CRC counts as 0."""
    return zlib.crc32(raw[_CRC_AT + 4 :], zlib.crc32(raw[:_CRC_AT] + bytes(4)))


@cache
def _names(record: type[Record]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


assert all(_OPENING.size + kind.NUMBERS.size == RECORD_BYTES for kind in (Announcement, Vote, FrameHeader))
