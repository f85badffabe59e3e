"""The sites prove, before the first round, that they were built alike."""

import json
from collections.abc import Mapping
from typing import Any

from .errors import AgreementError
from .transport import Transport


def agree_on_setup(everyone: Transport, ranks_per_site: int, setup: Mapping[str, Any]) -> None:
    """Compare what every rank was built with; JSON-able values only.

    Raises:
        AgreementError: on every rank; names what differs, where, and both values.
    """
    mine = json.dumps(setup).encode()
    blobs = everyone.swap_blobs(mine, phase="agreement at construction")
    setups = [json.loads(blob) for blob in blobs]

    def where(rank: int) -> str:
        site = f"site {rank // ranks_per_site}"
        return site if ranks_per_site == 1 else f"{site} (rank {rank})"

    for rank, theirs in enumerate(setups):
        if "error" in theirs:
            raise AgreementError(f"{where(rank)} could not be built: {theirs['error']}")
    for rank, theirs in enumerate(setups):
        if theirs == setups[0]:
            continue
        what, here, there = _difference(setups[0], theirs)
        raise AgreementError(f"the sites differ in {what}: site 0 has {here}, {where(rank)} has {there}")


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, Any, Any]:
    key = next(k for k in ours | theirs if ours.get(k) != theirs.get(k))
    a, b = ours.get(key), theirs.get(key)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"the number of {key}", len(a), len(b)
        k = next(k for k in range(len(a)) if a[k] != b[k])
        return f"{key} (number {k})", a[k], b[k]
    return key, a, b
