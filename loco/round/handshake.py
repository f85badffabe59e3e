"""The sites prove, before the first round, that they were built alike."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels

from ..errors import AgreementError, ReplicaError
from ..members.view import SiteTopology
from ..net.transport import Transport
from .parameters import FlatParameters

_AT_A_TIME = 1 << 20  # elements


def agree_on_parameters(
    everyone: Transport, topology: SiteTopology, inner: Optimizer, setup: Mapping[str, Any]
) -> FlatParameters:
    """The parameters as a flat vector, once all ranks have found that they agree on it and on `setup`.

    A rank that can't go on says so before it raises, so that the others do not wait for it.
    """
    setup = {"sites": topology.num_sites} | dict(setup)
    failure: Exception | None = None
    try:
        layout = FlatParameters(inner)
        check_denormals(layout.device)
        setup["parameters"] = layout.describe()
    except Exception as error:
        failure, layout = error, None
        setup = {"error": f"{type(error).__name__}: {error}"}
    try:
        agree_on_setup(everyone, topology.ranks_per_site, setup)
    except AgreementError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    assert layout is not None
    return layout


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


def fingerprint(described: Any) -> str:
    """A few characters that are the same for the same description; JSON-able values only."""
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=8).hexdigest()


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, Any, Any]:
    key = next(k for k in ours | theirs if ours.get(k) != theirs.get(k))
    a, b = ours.get(key), theirs.get(key)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"the number of {key}", len(a), len(b)
        k = next(k for k in range(len(a)) if a[k] != b[k])
        return f"{key} (number {k})", a[k], b[k]
    return key, a, b


def check_denormals(device: torch.device) -> None:
    """The sites' bits agree only if all of them keep denormals."""
    tiny = torch.full((1,), 2.0**-140, dtype=torch.float32, device=device)
    if float(tiny * 0.5) == 0.0:
        raise ValueError(
            "this process flushes denormal numbers to zero, so its bits would differ from the other sites': "
            "call torch.set_flush_denormal(False)"
        )


def check_first_anchor(
    everyone: Transport, topology: SiteTopology, layout: FlatParameters, anchor: Tensor, start: int
) -> None:
    """Every rank tells every other what it sees of its slice, from `start`, so that all refuse it or none."""
    first_bad = first_nonfinite(anchor)
    first_bad += start if first_bad >= 0 else 0
    digest = kernels.digest(anchor)
    record = first_bad.to_bytes(8, "little", signed=True) + digest.to_bytes(8, "little")
    records = everyone.swap_records(record, phase="check of the first anchor")
    of_site_0 = records[: topology.ranks_per_site]
    for rank, raw in enumerate(records):
        position = int.from_bytes(raw[:8], "little", signed=True)
        if position >= 0:
            raise ValueError(f"parameter {layout.name_at(position)} is infinite or NaN on site 0")
        site, index = divmod(rank, topology.ranks_per_site)
        if raw != of_site_0[index]:
            raise ReplicaError(f"site {site} did not receive the anchor that site 0 sent")


def first_nonfinite(values: Tensor) -> int:
    """The place of the first infinity or NaN, or -1."""
    begin = 0
    for part in values.split(_AT_A_TIME):  # isfinite() takes five bytes more for each element
        bad = part.isfinite().logical_not_().nonzero()
        if bad.numel():
            return begin + int(bad[0])
        begin += part.numel()
    return -1
