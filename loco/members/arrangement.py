"""Which ranks of one world form which site: what each rank was told, and what follows for all."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ..errors import AgreementError

# The fields of a PeerReport; False and zeros where a rank can't make one.
_REPORT = struct.Struct("<?III8s")


class PeerReport(NamedTuple):
    """What one rank tells all others of its peers: the ranks of the same number in each site.

    Attributes:
        sites: how many peers there are, with this rank.
        site: this rank's position among them.
        first: the peer in site 0.
        digest: of all of them.
    """

    sites: int
    site: int
    first: int
    digest: bytes

    @staticmethod
    def of(peers: Sequence[int], rank: int) -> "PeerReport":
        return PeerReport(len(peers), peers.index(rank), peers[0], _digest(peers))

    def pack(self) -> bytes:
        return _REPORT.pack(True, *self)


NO_REPORT = bytes(_REPORT.size)  # of a rank whose arguments are refused


def consecutive_peers(ranks_per_site: int, rank: int, world: int) -> list[int]:
    """The peers of a rank where consecutive ranks form a site.

    Raises:
        ValueError: the world can't be divided so.
    """
    if ranks_per_site < 1:
        raise ValueError(f"ranks_per_site must be >= 1, got {ranks_per_site}")
    if world % ranks_per_site:
        raise ValueError(
            f"the world's {world} ranks can't be divided into sites of {ranks_per_site}: "
            f"ranks_per_site must divide the world size"
        )
    return list(range(rank % ranks_per_site, world, ranks_per_site))


def peers_in_mesh(mesh: Any, rank: int, world: int) -> list[int]:
    """The peers of a rank where a mesh of one dimension goes across the sites, in its order.

    Raises:
        ValueError: it is another kind of mesh, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh must be the dimension of a DeviceMesh that goes across the sites, such as "
            f'mesh["site"], got {type(mesh).__name__}'
        )
    if mesh.ndim != 1:
        names = f", which are {list(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else ""
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions{names}: pass mesh['site'], the one that goes across the sites"
        )
    peers = mesh.mesh.tolist()
    if rank not in peers:
        raise ValueError(f"mesh has the ranks {peers}, and rank {rank} is not among them")
    if world % len(peers):
        raise ValueError(f"mesh has {len(peers)} sites, which must divide the world's {world} ranks")
    return peers


def arrange(told: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each site, in the order of their peers in site 0.

    Args:
        told: by rank of the world, its report.

    Raises:
        AgreementError: the same on all ranks, as all have been told the same.
    """
    world, reports = len(told), list[PeerReport]()
    for rank, record in enumerate(told):
        can, *fields = _REPORT.unpack(record)
        reports.append(report := PeerReport(*fields))
        if not can or not 0 < report.sites <= world:
            raise AgreementError(f"rank {rank} of {world} can't say which ranks form a site: see its error")
    sites = reports[0].sites
    for rank, report in enumerate(reports):
        if report.sites != sites:
            raise AgreementError(
                f"ranks_per_site differs: rank 0 has {world // sites}, rank {rank} of {world} has "
                f"{world // report.sites}"
            )
    by_position = {(report.site, report.first): rank for rank, report in enumerate(reports)}
    for rank, report in enumerate(reports):
        peers = [by_position.get((site, report.first), -1) for site in range(sites)]
        if _digest(peers) != report.digest:
            raise AgreementError(
                f"the ranks do not agree on the sites: not all peers that rank {rank} of {world} has across "
                f'them say so, too. Give all ranks the same mesh["site"], or the same ranks_per_site'
            )
    firsts = sorted({report.first for report in reports})
    return [[by_position[site, first] for first in firsts] for site in range(sites)]


def _digest(peers: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(peers)).encode(), digest_size=8).digest()
