"""Sites that share one world, as a user says who they are."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..coordination.authentication import LEAST_KEY_BYTES
from ..errors import START_AGAIN, advising
from ..net.listening import Endpoint
from .fixed import FixedSites
from .one_world import OneWorld
from .world import WorldMembership

_DEFAULTS = {"timeout": 300.0, "patience": 600.0, "dead_after": 5.0}  # seconds


class Topology(FixedSites):
    """Sites that share one world: of consecutive ranks, or as a mesh has them; by default every rank is one.

    Build it on every rank. It calls `torch.distributed.init_process_group()` if you have not. With several
    ranks per site, let DDP average the gradients inside the site, and give the optimizer the same topology:

        topology = loco.Topology(ranks_per_site=8)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        optimizer = loco.PulseLoCo(inner, topology=topology)

    With a `DeviceMesh`, `mesh["site"]` is the dimension of it that goes across the sites, in whichever place
    it is. A site is all ranks with the same coordinate in it, and the other dimensions are for FSDP2, HSDP
    and tensor parallelism inside a site:

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("site", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = loco.PulseLoCo(inner, topology=loco.Topology(mesh=mesh["site"]))

    Across the sites each rank exchanges its own slice of the flat state with the ranks of the same
    number in the other sites, so that the ranks of a site share the work, the memory and the link. loco
    numbers the ranks site by site, in errors and in files too: rank 5 is rank 1 of site 1 of four ranks.

    Args:
        ranks_per_site: consecutive ranks that form a site; must divide the world size. By default 1.
        mesh: of one dimension, the same on all ranks: in the place of `ranks_per_site`.
        timeout: seconds a rank waits for a message of another one that is alive, from the moment it is ready
            for it until the last byte is there, before the round fails. Slow links and big payloads need
            more. By default what LOCO_TIMEOUT says, or 300.
        patience: seconds it waits at the start of a round for a rank that is alive and still computing, or
            whose program hangs. By default what LOCO_PATIENCE says, or 600.
        dead_after: seconds within which a rank that is waited for and sends no heartbeats, because its
            process is dead or stopped or its link is cut, fails the round. By default what LOCO_DEAD_AFTER
            says, or 5.
        repeats: how often a round whose links were lost, between ranks that live, is tried again over new
            ones before it fails; and so the first links. A link that is idle for minutes may be cut by
            whatever it passes through.
        ports: at which this rank listens for others, such as "29511-29520", where a firewall lets only these
            through; by default what LOCO_PORTS says, or any. Give as many as a machine has ranks, or more.
        key: at least 16 bytes that all ranks share and nobody else knows: every message then proves that it
            is genuine. For links that others can write to; it hides nothing (SECURITY.md).

    Attributes:
        num_sites: R.
        site: this rank's site, 0 … R−1.
        rank_in_site: this rank's number inside its site, 0 … ranks_per_site−1.
        site_group: the ranks of this site, for DDP. torch numbers them in the order of their ranks.
        rendezvous: by which all ranks agree outside of rounds.

    Raises:
        ValueError: neither a process group nor a launcher, or a world that can't be divided so.
        AgreementError: the ranks were told different sites, or not all have a key.
        TransportError: a rank did not come, or the sites' store does not answer.
    """

    @advising(START_AGAIN)
    def __init__(
        self,
        *,
        ranks_per_site: int | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float | None = None,
        patience: float | None = None,
        dead_after: float | None = None,
        repeats: int = 2,
        ports: str | None = None,
        key: bytes | None = None,
    ) -> None:
        limits = time_limits(timeout=timeout, patience=patience, dead_after=dead_after)
        check_others(repeats=repeats, key=key)
        super().__init__(
            OneWorld(
                ranks_per_site,
                mesh,
                endpoint=Endpoint.of(ports),
                timeout=limits["timeout"],
                patience=limits["patience"],
            ),
            **limits,
            repeats=repeats,
            key=key,
        )

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> WorldMembership:
        """Of one optimizer. All ranks have proven that they agree on its setup."""
        return WorldMembership(self, device)

    def __repr__(self) -> str:
        return (
            f"Topology(ranks_per_site={self.ranks_per_site}, timeout={self.timeout:g}, "
            f"patience={self.patience:g}, dead_after={self.dead_after:g}): "
            f"{self.num_sites} sites, this is site {self.site}, rank {self.rank_in_site} in it"
        )


def time_limits(**given: float | None) -> dict[str, float]:
    """Seconds, by name: as given, or as the environment says (LOCO_DEAD_AFTER), or the default.

    Raises:
        ValueError: a limit is not above 0; names the argument or the variable.
    """
    limits = {}
    for name, value in given.items():
        variable = f"LOCO_{name.upper()}"
        source, found = (name, value) if value is not None else (variable, os.environ.get(variable) or None)
        try:
            limits[name] = _DEFAULTS[name] if found is None else float(found)
        except ValueError:
            limits[name] = math.nan
        if not limits[name] > 0:
            raise ValueError(f"{source} must be > 0 seconds, got {found}")
    return limits


def check_others(*, repeats: int, key: bytes | None) -> None:
    """Refuse what is out of range, by its name."""
    if repeats < 0:
        raise ValueError(f"repeats must be >= 0, got {repeats}")
    if key is not None and len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"key must have at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
