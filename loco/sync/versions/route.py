"""Which files lead from what a subscriber holds to the version that it wants."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from .manifest import File, Manifest


class Held(NamedTuple):
    """What a subscriber has of one publisher's weights."""

    version: int
    digest: str


class Step(NamedTuple):
    manifest: Manifest  # of the version that it leads to
    file: File


class _Branch(NamedTuple):
    """A version that has not been looked at, and what leads from it to the goal."""

    version: int
    digest: str | None  # that its weights must have
    route: list[Step]


Read = Callable[[int], Manifest | None]  # of a version; None: it is gone


def find_route(read: Read, goal: int, held: Held | None, avoid: Collection[str]) -> list[Step] | None:
    """The files to apply, in order; None if there is no way.

    From what is held, or from an anchor if that takes fewer bytes. Each step backwards is as long as
    possible, so that about 2·log₂ n manifests are read for n missed versions.

    Args:
        avoid: paths of files that were found damaged.
    """
    last, routes = read(goal), []
    if last is None:
        return None
    if held is not None:
        route = _walk(read, goal, avoid, held.version, held)
        if route is not None:
            if len(route) < 2 or bytes_of(route) <= _anchor_bytes(read(last.anchor)):
                return route
            routes.append(route)
    for lowest in dict.fromkeys((last.anchor, 0)):
        route = _walk(read, goal, avoid, lowest, None)
        if route is not None:
            routes.append(route)
            break
    return min(routes, key=bytes_of, default=None)


def _anchor_bytes(manifest: Manifest | None) -> int:
    file = None if manifest is None else manifest.file(None)
    return 0 if file is None else file.bytes


def bytes_of(route: list[Step]) -> int:
    return sum(step.file.bytes for step in route)


def _walk(read: Read, goal: int, avoid: Collection[str], lowest: int, held: Held | None) -> list[Step] | None:
    """Backwards from `goal`, the longest steps first and none to before `lowest`: to what is held, or if that
    is None to an anchor.
    """
    tried, waiting = set[int](), [_Branch(goal, None, [])]
    while waiting:
        version, digest, route = waiting.pop()
        manifest = None if version in tried else read(version)
        if manifest is None or digest not in (None, manifest.digest):
            continue  # it is gone, or somebody else published another version of that number
        tried.add(version)
        if held == (version, manifest.digest):
            return route
        anchor = manifest.file(None) if held is None else None
        if anchor is not None and anchor.path not in avoid:
            return [Step(manifest, anchor), *route]
        patches = [
            (f.base, f)
            for f in manifest.files
            if f.base is not None and f.base >= lowest and f.path not in avoid
        ]
        # Manifests are read only of those that come next, the longest step first.
        for base, file in sorted(patches, key=lambda patch: patch[0], reverse=True):
            waiting.append(_Branch(base, file.base_digest, [Step(manifest, file), *route]))
    return None
