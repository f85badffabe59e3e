"""The sites prove, before the first round, that they were built alike."""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels

from ...errors import AgreementError, ReplicaError
from ...members.view import SiteTopology
from ...net.transport import Transport
from ...parameters.flat_parameters import FlatParameters
from ...parameters.part import Part
from ..inside_site import differing_copies, digests_of_copies
from ..outer.outer_state import OuterState

_AT_A_TIME = 1 << 20  # elements


class Agreed(NamedTuple):
    """The parameters as a flat vector, this rank's part of it, and what identifies those of a site."""

    parameters: FlatParameters
    part: Part
    fingerprint: str


def agree_on_parameters(
    all_ranks: Transport, topology: SiteTopology, inner: Optimizer, setup: Mapping[str, Any]
) -> Agreed:
    """The parameters, once all ranks have found that they agree on them and on `setup`.

    A rank that can't go on says so before it raises, so that the others do not wait for it.
    """
    each = topology.ranks_per_site
    shards: Sequence[Any] = ()  # by rank of this site
    setup = {"sites": topology.num_sites} | dict(setup)
    failure: Exception | None = None
    try:
        layout = FlatParameters(inner, _ranks_of_site(topology))
        check_denormals()
        setup["parameters"], setup["shards"] = layout.describe(), layout.shards()
    except Exception as error:
        failure, layout = error, None
        setup = {"error": f"{type(error).__name__}: {error}"}
    try:
        setups = agree_on_setup(all_ranks, each, setup)
        first = all_ranks.rank - topology.rank_in_site
        shards = [theirs["shards"] for theirs in setups[first : first + each]]
    except AgreementError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    assert layout is not None
    described = layout.describe()
    rank, sizes = topology.rank_in_site, [math.prod(shape) for shape in layout.shapes]
    if not layout.is_sharded:
        return Agreed(layout, Part.of_whole(rank, each, sizes), fingerprint(described))
    return Agreed(layout, Part.of_shards(rank, shards, sum(sizes)), fingerprint([described, shards]))


def _ranks_of_site(topology: SiteTopology) -> list[int]:
    """By their numbers in the process group, as device meshes have them."""
    group = topology.site_group
    return [0] if group is None else dist.get_process_group_ranks(group)


def agree_on_setup(
    all_ranks: Transport, ranks_per_site: int, setup: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Compare what every rank was built with; JSON-able values only -> all ranks' setups.

    "shards" is compared among the ranks of the same number in each site, all else among all ranks.

    Raises:
        AgreementError: on every rank; names what differs, where, and both values.
    """
    mine = json.dumps(setup).encode()
    blobs = all_ranks.swap_blobs(mine, phase="agreement at construction")
    setups = [json.loads(blob) for blob in blobs]

    for rank, theirs in enumerate(setups):
        if "error" in theirs:
            raise AgreementError(f"{all_ranks.called(rank)} could not be built: {theirs['error']}")
    for rank, theirs in enumerate(setups):
        peer = rank % ranks_per_site  # of site 0
        expected = setups[0] | {what: told for what, told in setups[peer].items() if what == "shards"}
        if theirs == expected:
            continue
        what, here, there = _difference(expected, theirs)
        first = all_ranks.called(peer if what.startswith("shards") else 0)
        other = all_ranks.called(rank)
        raise AgreementError(f"the sites differ in {what}: {first} has {here}, {other} has {there}")
    return setups


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


def check_denormals() -> None:
    """The sites' bits agree only if all of them keep denormals. One switch of this thread flushes those of
    all types, so Python's own tell."""
    if sys.float_info.min * 0.5 == 0.0:
        raise ValueError(
            "this process flushes denormal numbers to zero, so its bits would differ from the other sites': "
            "call torch.set_flush_denormal(False)"
        )


def check_first_anchor(all_ranks: Transport, state: OuterState) -> None:
    """Every rank tells every other what it sees of its part of θ, and of the weights that it has in common
    with other ranks, so that all refuse them or none."""
    layout, part, each = state.parameters, state.part, state.topology.ranks_per_site
    first_bad = first_nonfinite(state.anchor)
    bad_param = layout.index_at(state.start + first_bad) if first_bad >= 0 else -1
    digest = kernels.digest(state.anchor)
    record = bad_param.to_bytes(8, "little", signed=True) + digest.to_bytes(8, "little")
    record += digests_of_copies(layout, part)
    records = all_ranks.swap_records(record, phase="check of the first anchor")
    for rank, raw in enumerate(records):
        param = int.from_bytes(raw[:8], "little", signed=True)
        if param >= 0:
            name = layout.name_of(param)
            raise ValueError(f"parameter {name} is infinite or NaN on {all_ranks.called(rank % each)}")
        if raw[:16] != records[rank % each][:16]:
            sender = all_ranks.called(rank % each)
            raise ReplicaError(f"{all_ranks.called(rank)} did not receive the anchor that {sender} sent")
    for first in range(0, len(records), each):
        copies = differing_copies([raw[16:] for raw in records[first : first + each]], part)
        if copies is not None:
            ranks = all_ranks.called(*(first + rank for rank in copies.ranks))
            raise ReplicaError(
                f"{ranks} hold copies of parameter {layout.name_of(copies.params[0])} and others, and these "
                f"differ: give all ranks of a site "
                f"the same weights (the same seed, or the same file) before you build the optimizer"
            )


def first_nonfinite(values: Tensor) -> int:
    """The place of the first infinity or NaN, or -1."""
    begin = 0
    for part in values.split(_AT_A_TIME):  # isfinite() takes five bytes more for each element
        bad = part.isfinite().logical_not_().nonzero()
        if bad.numel():
            return begin + int(bad[0])
        begin += part.numel()
    return -1
