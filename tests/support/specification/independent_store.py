"""Read a store of published weights in plain Python, as docs/sync-format.md describes it.

A second reading of the text, beside independent_patch_decoder.py. Weights are the bits of each vector's
elements, by the vector's format.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from independent_patch_decoder import FORMATS, decode_anchor, decode_patch, digest_of, must

BYTES = {"bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float64": 8}  # of other dtypes

Weights = dict[str, list[int]]


class Entry(NamedTuple):
    """Of a layout: some elements of a tensor."""

    name: str
    shape: list[int]
    dtype: str
    offset: list[int]
    size: list[int]
    start: int
    stop: int

    @property
    def format(self) -> str:
        return self.dtype if self.dtype in FORMATS else "uint8"

    @property
    def elements(self) -> int:
        """Of the vector."""
        return (self.stop - self.start) * (1 if self.dtype in FORMATS else BYTES[self.dtype])


def read_layout(text: bytes) -> dict[str, list[Entry]]:
    """The entries of each vector."""
    vectors: dict[str, list[Entry]] = defaultdict(list)
    for name, shape, dtype, *part in json.loads(text):
        offset, size, start, stop = part or ([0] * len(shape), shape, 0, math.prod(shape))
        entry = Entry(name, shape, dtype, offset, size, start, stop)
        vectors[entry.format].append(entry)
    return dict(sorted(vectors.items()))


def blake2b(data: bytes, size: int, person: bytes = b"", key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=size, person=person, key=key).digest()


def read_manifest(text: bytes, key: bytes | None = None) -> dict[str, Any]:
    first, seal, *rest = text.split(b"\n")
    must(rest == [b""], "a manifest must have two lines", len(rest) + 1)
    expected = blake2b(first, 16, b"loco manifest")
    if key is not None:
        expected = blake2b(first, 32, b"loco manifest", blake2b(key, 32, b"loco sync key"))
    must(seal == expected.hex().encode(), "a manifest must have its seal", seal)
    found = json.loads(first)
    must(found["format"] == 2, "format must be 2", found["format"])
    return found


class Store:
    """A folder in which publishers write."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder, self.key = folder, key

    def versions(self) -> list[int]:
        """Those of which all publishers' manifests are there."""
        seen: dict[tuple[int, int], int] = defaultdict(int)
        for path in self.folder.glob("versions/[0-9]*.json"):
            version, of, _ = path.name.split(".")
            seen[int(version), int(of.partition("-of-")[2])] += 1
        return sorted(version for (version, count), found in seen.items() if found == count)

    def manifests(self, version: int) -> list[dict[str, Any]]:
        """Of all publishers."""
        paths = sorted(self.folder.glob(f"versions/{version:012}.*-of-*.json"))
        found = [read_manifest(path.read_bytes(), self.key) for path in paths]
        for path, manifest in zip(paths, found, strict=True):
            name = f"{manifest['version']:012}.{manifest['index']}-of-{manifest['count']}.json"
            must(path.name == name, f"a manifest must be named {name}", path.name)
            must(manifest["count"] == len(found), "all publishers' manifests must be there", len(found))
            must(manifest["training"] == found[0]["training"], "all must be of one training", path.name)
        for name in {name for manifest in found for name in manifest["ties"]}:
            values = {manifest["ties"][name] for manifest in found if name in manifest["ties"]}
            must(len(values) == 1, f"{name} must be the same for all publishers", values)
        return found

    def layout(self, manifest: dict[str, Any]) -> dict[str, list[Entry]]:
        text = (self.folder / "layouts" / f"{manifest['layout']}.json").read_bytes()
        must(len(text) == manifest["layout_bytes"], "a layout must have its size", len(text))
        must(
            hashlib.sha256(text).hexdigest() == manifest["layout"],
            "a layout must have its SHA-256",
            text[:80],
        )
        return read_layout(text)

    def follow(self, manifest: dict[str, Any], file: dict[str, Any], base: Weights | None) -> Weights:
        """The weights that one file leads to, from those of its base; checked in every way."""
        layout = self.layout(manifest)
        raw = (self.folder / file["path"]).read_bytes()
        must(len(raw) == file["bytes"], f"a file must have {file['bytes']} bytes", len(raw))
        must(hashlib.sha256(raw).hexdigest() == file["sha256"], "a file must have its SHA-256", file["path"])
        bodies, at = {}, 0
        for body in file["bodies"]:
            bodies[body["format"]] = raw[at : at + body["bytes"]], body["entries"]
            at += body["bytes"]
        must(at == len(raw), "the bodies must be the whole file", at)
        made: Weights = {}
        for format, entries in layout.items():
            n = sum(entry.elements for entry in entries)
            if file["base"] is None:
                made[format] = decode_anchor(bodies[format][0], n, format)
                continue
            assert base is not None
            made[format] = list(base[format])
            if format in bodies:
                changes = decode_patch(bodies[format][0], base[format], format)
                must(
                    len(changes) == bodies[format][1], "a patch must have its number of changes", len(changes)
                )
                for position, bits in changes:
                    made[format][position] = bits
        if base is not None and file["base"] is not None:
            must(digest_of_all(layout, base) == file["base_digest"], "a patch must fit", file["base_digest"])
        must(
            digest_of_all(layout, made) == manifest["digest"], "weights must have their digest", file["path"]
        )
        return made


def contents(layout: dict[str, list[Entry]], weights: Weights) -> Iterator[tuple[Entry, bytes]]:
    """Each entry with the bytes of its elements."""
    for format, entries in layout.items():
        ends = list(accumulate((entry.elements for entry in entries), initial=0))
        for entry, first, last in zip(entries, ends, ends[1:], strict=False):
            width = FORMATS[format][0]
            yield entry, b"".join(bits.to_bytes(width, "little") for bits in weights[format][first:last])


def digest_of_all(layout: dict[str, list[Entry]], weights: Weights) -> str:
    each = b""
    for format, entries in layout.items():
        first = 0
        for entry in entries:
            each += digest_of(weights[format][first : first + entry.elements]).to_bytes(8, "little")
            first += entry.elements
    return blake2b(each, 8).hex()
