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
    mine = json.dumps(setup, sort_keys=True).encode()
    blobs = everyone.swap_blobs(mine, phase="agreement at construction")
    first = json.loads(blobs[0])
    for rank, blob in enumerate(blobs):
        if blob == blobs[0]:
            continue
        what, ours, theirs = _difference(first, json.loads(blob))
        where = f"site {rank // ranks_per_site}"
        if ranks_per_site > 1:
            where += f" (rank {rank})"
        raise AgreementError(f"the sites differ in {what}: site 0 has {ours}, {where} has {theirs}")


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, Any, Any]:
    key = next(k for k in ours | theirs if ours.get(k) != theirs.get(k))
    a, b = ours.get(key), theirs.get(key)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"the number of {key}", len(a), len(b)
        k = next(k for k in range(len(a)) if a[k] != b[k])
        return f"{key} (number {k})", a[k], b[k]
    return key, a, b
