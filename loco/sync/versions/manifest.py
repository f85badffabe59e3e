"""Manifests: what one publisher writes about one version, its files, and the digests of files and weights.

A manifest is written last, so a version is there whole or not at all.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import AuthenticationError
from ..errors import DamagedError
from ..storage.names import is_path
from ..storage.stores import Store

FOLDER = "versions"
WEIGHTS = "weights"  # the folder of anchors and patches
FORMAT = 2
LEAST_KEY_BYTES = 16
MOST_BYTES = 1 << 20  # of a manifest: about 30 times what the longest one takes
LAST_VERSION = 10**12 - 1  # names have 12 digits
_NAME = re.compile(r"([0-9]{12})\.([0-9]{1,6})-of-([0-9]{1,6})\.json")


@dataclass(frozen=True, order=True)
class Stream:
    """Which of `count` publishers that share the work this one is: number `index`, from 0."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}-of-{self.count}"


def name_of(version: int, stream: Stream) -> str:
    return f"{version:012d}.{stream}.json"


def parse_name(name: str) -> tuple[int, Stream] | None:
    """The inverse of `name_of`; None for any other file."""
    parts = _NAME.fullmatch(name)
    if not parts:
        return None
    version, index, count = map(int, parts.groups())
    found = version, Stream(index, count)
    return found if name_of(*found) == name and found[1].index < found[1].count else None


def path_of_file(version: int, stream: Stream, attempt: str, base: int | None) -> str:
    """Where an anchor or a patch lies.

    Args:
        attempt: another one each time that a version is written. Else two publishers could replace each
            other's files, and one that was killed those of its successor.
    """
    kind = "anchor" if base is None else f"from-{base:012d}"
    return f"{WEIGHTS}/{version:012d}.{stream}.{attempt}.{kind}"


def version_of_file(name: str) -> tuple[int, Stream] | None:
    """Whose file this is, by its name; None for any other file."""
    version, _, rest = name.partition(".")
    return parse_name(f"{version}.{rest.partition('.')[0]}.json")


def attempt_of(name: str) -> str:
    """Of the name of an anchor or a patch."""
    return ".".join(name.split(".")[2:3])


def complete_versions(names: list[str]) -> dict[int, int]:
    """The versions of which every publisher's manifest is there, in order. -> {version: publishers}"""
    seen: dict[tuple[int, int], int] = {}
    for version, stream in filter(None, map(parse_name, names)):
        seen[version, stream.count] = seen.get((version, stream.count), 0) + 1
    return {version: count for (version, count), found in sorted(seen.items()) if found == count}


def what_is_missing(names: list[str]) -> str:
    """Why no version of a store is complete."""
    seen: dict[tuple[int, int], int] = {}
    for version, stream in filter(None, map(parse_name, names)):
        seen[version, stream.count] = seen.get((version, stream.count), 0) + 1
    if not seen:
        return "nothing is published there"
    version, count = max(seen)
    found = f"of version {version} there are {seen[version, count]} of {count} parts"
    return f"{found}. All {count} publishers must publish into one store"


@dataclass(frozen=True, kw_only=True)
class Body:
    """One vector in a file."""

    format: str
    bytes: int
    entries: int  # of a patch: how many elements change


@dataclass(frozen=True, kw_only=True)
class File:
    path: str
    bytes: int
    sha256: str
    base: int | None  # the version that a patch starts from; None for an anchor
    base_digest: str  # of its weights
    bodies: tuple[Body, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    version: int
    index: int
    count: int
    run: str  # of the publisher's process: new with every start
    training: str  # the same in all manifests of a training, however often it is resumed
    ties: Mapping[str, str]  # see `ties.py`
    layout: str  # SHA-256 of the layout, which is a file of that name
    layout_bytes: int
    digest: str  # of the weights
    anchor: int  # the newest version of which there is an anchor
    files: tuple[File, ...]

    @property
    def stream(self) -> Stream:
        return Stream(self.index, self.count)

    @property
    def path(self) -> str:
        return f"{FOLDER}/{name_of(self.version, self.stream)}"

    def file(self, base: int | None) -> File | None:
        return next((file for file in self.files if file.base == base), None)

    def dump(self, key: bytes | None) -> bytes:
        said = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))
        return f"{said}\n{_seal(said.encode(), key)}\n".encode()

    @staticmethod
    def load(text: bytes, path: str, key: bytes | None) -> "Manifest":
        """
        Raises:
            DamagedError: it is not what a publisher wrote.
            AuthenticationError: whoever wrote it has not the key.
        """
        said, _, rest = text.partition(b"\n")
        seal = rest.decode("ascii", "replace").removesuffix("\n")
        if not hmac.compare_digest(seal.encode(), _seal(said, None).encode()) and key is None:
            what = "is sealed with a key, and none was given" if len(seal) == 64 else "is damaged"
            raise DamagedError(path, what)
        if key is not None and not hmac.compare_digest(seal.encode(), _seal(said, key).encode()):
            raise AuthenticationError(
                f"{path} was not written by a publisher that has the key, or is damaged"
            )
        try:
            manifest = _manifest(json.loads(said))
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError(path, f"is no manifest ({error})") from error
        if manifest.path != path:
            raise DamagedError(path, f"is the manifest {manifest.path} under another name")
        return manifest


def load_or_none(store: Store, version: int, stream: Stream, key: bytes | None) -> Manifest | None:
    """The manifest in a store; None if there is none.

    Raises:
        DamagedError, AuthenticationError: as of `Manifest.load`.
    """
    path = f"{FOLDER}/{name_of(version, stream)}"
    try:
        text = store.read(path, MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > MOST_BYTES:
        raise DamagedError(path, f"has more than {MOST_BYTES} bytes, so it is no manifest")
    return Manifest.load(text, path, key)


def _manifest(fields: dict[str, Any]) -> Manifest:
    if fields.pop("format") != FORMAT:
        raise ValueError("its format is of another version of loco")
    files = []
    for file in fields.pop("files"):
        bodies = tuple(Body(**body) for body in file.pop("bodies"))
        files.append(File(**file, bodies=bodies))
        sizes = [files[-1].bytes, *(n for body in bodies for n in (body.bytes, body.entries))]
        if not all(map(_is_natural, sizes)) or sum(body.bytes for body in bodies) != files[-1].bytes:
            raise ValueError("the sizes of a file do not add up")
    manifest = Manifest(**fields, files=tuple(files))
    texts = [manifest.run, manifest.training, manifest.layout, manifest.digest, *manifest.ties.values()]
    for file in files:
        texts += [file.path, file.sha256, file.base_digest, *(body.format for body in file.bodies)]
    if any(type(text) is not str for text in texts):
        raise ValueError("a text is none")
    numbers = [manifest.version, manifest.index, manifest.count, manifest.anchor, manifest.layout_bytes]
    bases = [file.base for file in files if file.base is not None]
    if not all(map(_is_natural, numbers + bases)) or any(n >= manifest.version for n in bases):
        raise ValueError("a version is no number, or does not come before its successor")
    if not all(re.fullmatch(rf"{WEIGHTS}/[\w.-]+", file.path) and is_path(file.path) for file in files):
        raise ValueError(f"a file lies outside of {WEIGHTS}")
    if not re.fullmatch("[0-9a-f]{64}", manifest.layout):
        raise ValueError("its layout is no SHA-256")
    return manifest


def _is_natural(n: Any) -> bool:
    return type(n) is int and n >= 0


def checked_key(key: str | bytes | None) -> bytes | None:
    if key is None:
        return None
    made = key.encode() if isinstance(key, str) else key
    if len(made) < LEAST_KEY_BYTES:
        raise ValueError(f"key must have at least {LEAST_KEY_BYTES} bytes, got {len(made)}")
    return made


def _seal(said: bytes, key: bytes | None) -> str:
    """With a key, a proof of who wrote it, of 32 bytes; without one a checksum, of 16."""
    if key is None:
        return hashlib.blake2b(said, digest_size=16, person=b"loco manifest").hexdigest()
    made = hashlib.blake2b(key, digest_size=32, person=b"loco sync key").digest()
    return hashlib.blake2b(said, digest_size=32, key=made, person=b"loco manifest").hexdigest()
