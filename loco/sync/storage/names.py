"""Names of files in a store: which are allowed, how they are listed, and how a change is noticed."""

import hashlib
import json
import re
import time
from collections.abc import Callable

Buffer = bytes | memoryview
AT_ONCE = 8  # reads of one store, unless it can't bear several

# A name may not be empty, nor begin with a dot: "." and ".." do, and so do hidden and unfinished files.
_REFUSED = re.compile(r"(^|/)(\.|/|$)|[\\\x00-\x1f\x7f\ud800-\udfff]")


def is_path(path: str) -> bool:
    """Whether a store may have a file of this path: relative, with plain names between its slashes."""
    return not _REFUSED.search(path)


def check_path(path: str) -> str:
    """
    Raises:
        ValueError: no store has a file of this path. It could lead out of the store, or to what stores hide.
    """
    if not is_path(path):
        raise ValueError(
            f"a file in a store must have a relative path of plain names, none of which is empty, begins "
            f"with a dot, or holds a backslash or a control character, got {path!r}"
        )
    return path


def check_folder(folder: str) -> str:
    """As `check_path`. The topmost folder is ""."""
    return check_path(folder) if folder else folder


def may_change(path: str) -> bool:
    """Whether this is the folder `state` or a file in it. No other file is replaced once it is written."""
    return path == "state" or path.startswith("state/")


def encode_listing(names: list[str]) -> bytes:
    """The JSON that a server lists a folder as."""
    return json.dumps(names).encode()


def listing_tag(names: list[str]) -> str:
    """The ETag of that JSON. Whoever knows the names knows it, whichever server they came from."""
    return f'"{hashlib.blake2b(encode_listing(names), digest_size=16).hexdigest()}"'


def poll(names: Callable[[], list[str]], known: list[str], timeout: float, longest: float) -> list[str]:
    """Ask for the names until they differ from `known` or `timeout` seconds have passed.

    Args:
        longest: seconds to which the pause between two questions grows.
    """
    deadline = time.monotonic() + timeout
    pause = 0.05
    while (found := names()) == known and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, longest, left))
        pause *= 2
    return found
