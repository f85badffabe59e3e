"""The headers of requests: tokens, ranges, waits and the tags (ETags) of files.

A client that has a server's token may read, and write if the server is writable.
"""

import hashlib
import hmac
import io
import os
import re
from typing import BinaryIO

TOKEN_VARIABLE = "LOCO_SYNC_TOKEN"
SLOWEST_LINK = 32e3  # bytes per second, beside a timeout; a slower peer would hold the other one for ever


def find_token(token: str | None) -> str:
    """The token that is used; None: of LOCO_SYNC_TOKEN. Empty if there is none.

    Raises:
        ValueError: it can't travel in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("a token must be printable ASCII characters without a space")
    return token


def authorization(token: str) -> dict[str, str]:
    """What a request has in its headers."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_authorized(header: str | None, token: str) -> bool:
    return not token or hmac.compare_digest((header or "").encode(), f"Bearer {token}".encode())


def parse_range(header: str, size: int) -> range | None:
    """The bytes that a Range header asks for, of a file of `size` bytes; None if that is the whole file.

    The range is empty if the file has no such bytes. A header that asks for several ranges, or makes no
    sense, counts as none, as RFC 9110 allows.
    """
    found = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header)
    if not found or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last bytes
        return range(max(0, size - int(found[2])), size)
    start, stop = int(found[1]), int(found[2]) + 1 if found[2] else size
    if found[2] and stop <= start:
        return None
    return range(start, min(stop, size))


def preferred_wait(header: str) -> float:
    """The seconds for which a Prefer header (RFC 7240) lets an answer wait; here it may have decimals."""
    found = re.search(r"\bwait=([0-9]{1,9}(\.[0-9]{1,9})?)", header)
    return float(found[1]) if found else 0.0


def file_tag(file: BinaryIO) -> str:
    """The ETag of a file. Files are replaced, not changed, so another file has another tag."""
    if isinstance(file, io.BytesIO):
        return f'"{hashlib.blake2b(file.getbuffer(), digest_size=16).hexdigest()}"'
    status = os.fstat(file.fileno())
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
