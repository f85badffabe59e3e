"""Removes old versions of a publisher, but none that a subscriber may still need."""

from collections.abc import Iterator

from ..storage.stores import Store
from .manifest import FOLDER, WEIGHTS, Stream, attempt_of, name_of, parse_name, version_of_file
from .route import Read, find_route


def versions_of(names: list[str], stream: Stream) -> list[int]:
    """Those of one publisher, in order."""
    return sorted(version for version, whose in filter(None, map(parse_name, names)) if whose == stream)


def remove_old(store: Store, stream: Stream, keep: int, newest: int, read: Read) -> Iterator[int]:
    """Make room for a version: remove those of one publisher that nobody will need who is at most `keep`
    versions behind that one, or begins now.

    Kept are the last `keep` versions, and those that lead from an anchor to the first of these. -> those that
    are gone, one by one; some of their files may be left if the store fails

    Args:
        newest: the publisher's; what has a larger number is not its own.
        read: None also of a manifest that can't be read: nobody can use its version.
    """
    versions = [version for version in versions_of(store.names(FOLDER), stream) if version <= newest]
    if len(versions) <= keep:
        return
    first = versions[-keep]
    route = find_route(read, first, None, ())
    if route is None:
        return  # how a newcomer begins is not known, so nothing is taken away
    needed = {step.manifest.version for step in route}
    for version in versions:
        if version >= first or version in needed:
            continue
        manifest = read(version)
        # The manifest first, so that nobody begins to read what is about to go.
        store.delete(f"{FOLDER}/{name_of(version, stream)}")
        yield version
        for file in () if manifest is None else manifest.files:
            store.delete(file.path)


def remove_orphans(store: Store, stream: Stream, newest: int, read: Read) -> bool:
    """Remove the files of one publisher that belong to no version up to its newest one: what is left where
    one was killed, or the store failed. -> whether there are files of later versions, which may be orphans
    """
    found: dict[int, list[str]] = {}
    for name in store.names(WEIGHTS):
        if (whose := version_of_file(name)) and whose[1] == stream:
            found.setdefault(whose[0], []).append(name)
    later = [version for version in found if version > newest]
    for version in later:
        del found[version]
    there = set(versions_of(store.names(FOLDER), stream))  # listed later: what it lacks was not there before
    for version, names in found.items():
        used: set[str] = set()
        if version in there:
            if len({attempt_of(name) for name in names}) == 1:
                continue
            manifest = read(version)
            if manifest is None:
                continue  # it can't be told which of them it names
            used = {file.path for file in manifest.files}
        for name in names:
            if f"{WEIGHTS}/{name}" not in used:
                store.delete(f"{WEIGHTS}/{name}")
    return bool(later)
