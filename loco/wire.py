"""The header of every message: 64 bytes, little-endian, versioned. The README gives the same to the byte.

A payload is a header and a body. The header travels first and alone, to all sites: sizes, the θ digest and
the verdict on the round are known before a byte of a body is sent or memory for one is taken.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from loco import kernels
from loco.kernels import Entries

from .codec import CODECS, codec_for
from .errors import WireError

MAGIC = b"LOCO"
VERSION = 2
VOTE = 255  # in the place of a codec: a header without a body, that says how a site judges the round

# magic, version, codec, site, round, status, 0, subject, CRC, numel, entries, body, digest, checksum
_FORMAT = struct.Struct("<4s B B H I H H I I Q Q Q Q Q")
_CRC_AT = 20
HEADER_BYTES = _FORMAT.size
assert HEADER_BYTES == 64


class Status(IntEnum):
    """A site's verdict on a round."""

    OK = 0
    NON_FINITE = 1  # subject: the parameter whose update is infinite or NaN
    REPLICA = 2  # subject: the site whose anchor or round is another than site 0's
    UNREADABLE = 3  # subject: the site whose message could not be read
    SITE_DRIFT = 4  # subject: 0; the ranks of the reporting site hold different weights
    FAILED = 5  # subject: 0; the reporting rank's own error says what


@dataclass(frozen=True, kw_only=True)
class Header:
    codec: int
    site: int
    round: int
    status: Status = Status.OK
    subject: int = 0
    numel: int = 0  # elements of the vector the entries belong to
    entries: int = 0
    body_bytes: int = 0
    digest: int = 0  # of the sender's θ before the round
    checksum: int = 0  # digest of the body

    def pack(self) -> bytes:
        fields = (
            *(MAGIC, VERSION, self.codec, self.site, self.round, self.status, 0, self.subject, 0),
            *(self.numel, self.entries, self.body_bytes, self.digest, self.checksum),
        )
        raw = bytearray(_FORMAT.pack(*fields))
        struct.pack_into("<I", raw, _CRC_AT, zlib.crc32(raw))
        return bytes(raw)

    @staticmethod
    def unpack(raw: bytes) -> "Header":
        if len(raw) != HEADER_BYTES:
            raise WireError(f"a header of {len(raw)} bytes, not {HEADER_BYTES}")
        magic, version, codec, site, round_, status, zero, subject, crc, *sizes = _FORMAT.unpack(raw)
        if magic != MAGIC:
            raise WireError(f"a message that starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"wire version {version}; this site speaks version {VERSION}")
        blank = bytearray(raw)
        struct.pack_into("<I", blank, _CRC_AT, 0)
        if zlib.crc32(blank) != crc:
            raise WireError("a header whose CRC does not match")
        if zero != 0 or status not in list(Status):
            raise WireError("a header with an unknown status or reserved bits set")
        numel, entries, body_bytes, digest, checksum = sizes
        return Header(
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


def encode_payload(
    entries: Entries, *, site: int, round: int, numel: int, digest: int
) -> tuple[Header, Tensor]:
    """A site's entries as header and body, sealed with the body's digest."""
    codec = codec_for(entries)
    body = codec.encode(entries)
    header = Header(
        codec=codec.id,
        site=site,
        round=round,
        numel=numel,
        entries=entries.values.numel(),
        body_bytes=body.numel(),
        digest=digest,
        checksum=kernels.digest(body),
    )
    return header, body


def check_header(header: Header, *, site: int, numel: int, codec: int) -> None:
    """Refuse what is not this round's payload of that site, before memory is taken for its body.

    Rounds and digests are compared by the caller, who sees all sites' headers.
    """
    if header.codec != codec:
        raise WireError(f"codec {header.codec} where this site sends codec {codec}")
    if header.site != site:
        raise WireError(f"a header of site {header.site} on the link of site {site}")
    if header.numel != numel:
        raise WireError(f"a vector of {header.numel} elements, not {numel}")
    if header.body_bytes not in CODECS[codec].body_sizes(header.entries, numel):
        raise WireError(f"{header.body_bytes} bytes can't hold {header.entries} entries")


def decode_payload(header: Header, body: Tensor) -> Entries:
    """The entries of a payload whose header has passed `check_header`.

    Raises:
        WireError: the body is damaged or malformed.
    """
    if kernels.digest(body) != header.checksum:
        raise WireError("a body whose checksum does not match")
    return CODECS[header.codec].decode(body, header.entries, header.numel)
