"""Sites that each have a world of their own, as a user says who they are."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..coordination.rendezvous import Agreement
from ..net.transport import Transport
from .fixed import FixedSites
from .joined_worlds import JoinedWorlds
from .topology import check_limits
from .view import Membership


class Sites:
    """Sites that each have a world of their own: what one `torchrun`, Trainer or `accelerate launch` starts.

        topology = loco.Sites(2, site="berlin", at="10.0.0.1:29510")
        optimizer = loco.PulseLoCo(inner, sync_every=8, topology=topology)

    Inside its world a site trains as it always does: alone, with DistributedDataParallel, FSDP2, or what a
    framework does by itself. Across the sites each rank exchanges only its own part, with the ranks of the
    same number in the other sites. All sites have equally many ranks.

    A site that is lost fails the round on all others, which have changed nothing. All then build their
    `Sites` and optimizers anew, as `torchrun --max-restarts` does, and load their checkpoints.

    Args:
        sites: how many; by default what LOCO_SITES says.
        site: this one's name, the same when it comes back; by default what LOCO_SITE says. The sites are
            numbered in the order of their names.
        at: host:port at which they meet; by default what LOCO_AT says. The site whose machine has this
            address hosts a small store there, as long as it runs.
        timeout, dead_after, repeats, key: as `loco.Topology`.
        patience: seconds to wait for the other sites at the start, and at the start of a round.

    Attributes:
        num_sites: R.
        site: this site's number, 0 … R−1.
        names: of the sites, by number.
        ranks_per_site: the size of each site's world.
        rank_in_site: this rank's number in it.

    Raises:
        ValueError: an argument is missing, or out of range.
        AgreementError: the sites were started differently, or this one's name is taken.
        TransportError: not all sites came, or no store is at that address.
    """

    def __init__(
        self,
        sites: int | None = None,
        *,
        site: str | None = None,
        at: str | None = None,
        timeout: float = 300.0,
        patience: float = 600.0,
        dead_after: float = 5.0,
        repeats: int = 2,
        key: bytes | None = None,
    ) -> None:
        check_limits(timeout=timeout, patience=patience, dead_after=dead_after, repeats=repeats, key=key)
        count = _number(sites if sites is not None else _told("LOCO_SITES", "how many sites there are", "2"))
        name = site or _told("LOCO_SITE", "what this site is called", "berlin")
        where = at or _told("LOCO_AT", "where the sites meet", "10.0.0.1:29510")
        joined = JoinedWorlds(count, name, where, patience=patience, dead_after=dead_after)
        try:
            self._fixed = FixedSites(
                joined, timeout=timeout, patience=patience, dead_after=dead_after, repeats=repeats, key=key
            )
        except BaseException:
            joined.close()
            raise
        self.names = joined.names

    @property
    def num_sites(self) -> int:
        return self._fixed.num_sites

    @property
    def site(self) -> int:
        return self._fixed.site

    @property
    def ranks_per_site(self) -> int:
        return self._fixed.ranks_per_site

    @property
    def rank_in_site(self) -> int:
        return self._fixed.rank_in_site

    @property
    def notes(self) -> Agreement:
        return self._fixed.notes

    def everyone(self) -> Transport:
        return self._fixed.everyone()

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> Membership:
        return self._fixed.membership(device, setup)

    def seat(self) -> dict[str, Any]:
        """Who this rank is, as its state remembers it."""
        return {"name": self.names[self.site]} | self._fixed.seat()

    def close(self) -> None:
        """Leave: the others can't go on without this site."""
        self._fixed.close()

    def __repr__(self) -> str:
        return (
            f"Sites({self.num_sites}, site={self.names[self.site]!r}): this is site {self.site} "
            f"({', '.join(self.names)}), rank {self.rank_in_site} of {self.ranks_per_site} in it"
        )


def _told(variable: str, what: str, example: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        argument = variable.removeprefix("LOCO_").lower()
        raise ValueError(
            f"nobody says {what}: give {argument}=… or set {variable} (e.g. {variable}={example})"
        )
    return value


def _number(sites: int | str) -> int:
    try:
        count = int(sites)
    except ValueError:
        count = 0
    if count < 1 or count != float(sites):
        raise ValueError(f"sites (LOCO_SITES) must be a whole number >= 1, got {sites!r}")
    return count
