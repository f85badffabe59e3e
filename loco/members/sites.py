"""Sites that each have a world of their own, as a user says who they are."""

import logging
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ..errors import START_AGAIN, advising
from ..logs import warn_once_per_machine
from ..net.listening import Endpoint
from ..net.transport import Transport
from .elastic.elastic_sites import ElasticSites
from .elastic.quorum_membership import QuorumMembership
from .fixed import FixedSites
from .joined_worlds import JoinedWorlds
from .topology import Topology, check_others, time_limits
from .view import Agreement, Membership, SiteTopology
from .world import WorldMembership

_logger = logging.getLogger(__name__)
# By name and address, the latest of this process.
_of_this_process: WeakValueDictionary[tuple[str, str], FixedSites | ElasticSites] = WeakValueDictionary()
_VARIABLES = ("LOCO_SITES", "LOCO_SITE", "LOCO_AT", "LOCO_AT_LEAST", "LOCO_LIGHTHOUSE")


class Sites:
    """Sites that each have a world of their own: what one `torchrun`, Trainer or `accelerate launch` starts.

        topology = loco.Sites(2, site="berlin", at="10.0.0.1:29510")
        optimizer = loco.PulseLoCo(inner, sync_every=8, topology=topology)

    Inside its world a site trains as it always does: alone, with DistributedDataParallel, FSDP2, or what a
    framework does by itself. Across the sites each rank exchanges only its own part, with the ranks of the
    same number in the other sites. All sites have equally many ranks.

    A site that is lost fails the round on all others, which have changed nothing. All then build their
    `Sites` and optimizers anew, as `torchrun --max-restarts` does, and load their checkpoints. With
    `at_least` sites may come and go instead, while the others train on: docs/elastic.md.

    Args:
        sites: how many; by default what LOCO_SITES says.
        site: this one's name, the same when it comes back; by default what LOCO_SITE says. The sites are
            numbered in the order of their names.
        at: host:port at which they meet; by default what LOCO_AT says. The site whose machine has this
            address hosts a small store there, as long as it runs. With a lighthouse: where the others reach
            the store of this site; by default any port of this machine.
        at_least: go on with so many sites when others are lost, and take in those that come; by default what
            LOCO_AT_LEAST says, or else all, so that the sites stay the same.
        lighthouse: where torchft's lighthouse listens, such as "http://10.0.0.1:29510", which then says who
            is there instead of a store; by default what LOCO_LIGHTHOUSE says.
        timeout, dead_after, repeats, ports, key: as `loco.Topology`.
        patience: seconds to wait for the other sites at the start, and at the start of a round; by default
            what LOCO_PATIENCE says, or 600.

    Attributes:
        num_sites: R.
        site: this site's number, 0 … R−1.
        name: of this site.
        ranks_per_site: the size of each site's world.
        rank_in_site: this rank's number in it.

    Raises:
        ImportError: a lighthouse needs torchft.
        ValueError: an argument is missing, or out of range.
        AgreementError: the sites were started differently, or this one's name is taken.
        TransportError: not all sites came, or no store or lighthouse is at its address.
    """

    @advising(START_AGAIN)
    def __init__(
        self,
        sites: int | None = None,
        *,
        site: str | None = None,
        at: str | None = None,
        at_least: int | None = None,
        lighthouse: str | None = None,
        timeout: float | None = None,
        patience: float | None = None,
        dead_after: float | None = None,
        repeats: int = 2,
        ports: str | None = None,
        key: bytes | None = None,
    ) -> None:
        endpoint = Endpoint.of(ports)
        limits = time_limits(timeout=timeout, patience=patience, dead_after=dead_after)
        check_others(repeats=repeats, key=key)
        count = _number(sites if sites is not None else _told("LOCO_SITES", "how many sites there are", "2"))
        name = site or _told("LOCO_SITE", "what this site is called", "berlin")
        self.name = name
        at = at or os.environ.get("LOCO_AT") or None
        lighthouse = lighthouse or os.environ.get("LOCO_LIGHTHOUSE") or None
        least = _at_least(at_least, count, lighthouse)
        where = lighthouse or at or _told("LOCO_AT", "where the sites meet", "10.0.0.1:29510")
        _close_earlier(name, where)
        self._as: FixedSites | ElasticSites
        if lighthouse is not None or least is not None:
            self._as = ElasticSites(
                sites=count,
                name=name,
                at=at,
                at_least=least or 1,
                lighthouse=lighthouse,
                repeats=repeats,
                endpoint=endpoint,
                key=key,
                **limits,
            )
        else:
            patience, dead_after = limits["patience"], limits["dead_after"]
            joined = JoinedWorlds(
                count, name, where, endpoint=endpoint, patience=patience, dead_after=dead_after
            )
            try:
                self._as = FixedSites(joined, **limits, repeats=repeats, key=key)
            except BaseException:
                joined.close()
                raise
        _of_this_process[name, where] = self._as

    @property
    def num_sites(self) -> int:
        return self._as.num_sites

    @property
    def site(self) -> int:
        return self._as.site

    @property
    def ranks_per_site(self) -> int:
        return self._as.ranks_per_site

    @property
    def rank_in_site(self) -> int:
        return self._as.rank_in_site

    @property
    def is_elastic(self) -> bool:
        """Sites come and go: by `at_least`, or a lighthouse."""
        return self._as.is_elastic

    @property
    def site_group(self) -> dist.ProcessGroup | None:
        """This site's world."""
        return self._as.site_group

    @property
    def rendezvous(self) -> Agreement:
        return self._as.rendezvous

    @property
    def fixed(self) -> FixedSites | None:
        """The sites that stay the same; None if they come and go."""
        return self._as if isinstance(self._as, FixedSites) else None

    def all_ranks(self) -> Transport:
        return self._as.all_ranks()

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> Membership:
        if isinstance(self._as, ElasticSites):
            return QuorumMembership(self._as, device, setup)
        return WorldMembership(self._as, device)

    def seat(self) -> dict[str, Any]:
        """Who this rank is, as its state remembers it."""
        return {"name": self.name} | self._as.seat()

    @property
    def closed(self) -> str:
        """Why it is closed; "" as long as it is open."""
        return self._as.closed

    def close(self) -> None:
        """Leave: the others can't go on without this site."""
        self._as.close()

    def __repr__(self) -> str:
        return (
            f"Sites(site={self.name!r}): this is site {self.site} of {self.num_sites}, "
            f"rank {self.rank_in_site} of {self.ranks_per_site} in it"
        )


def _close_earlier(name: str, where: str) -> None:
    """A notebook's cell that is run again, or a training that is begun again after an error, builds its Sites
    anew while a traceback may still hold those of before."""
    earlier = _of_this_process.get((name, where))
    if earlier is not None and not earlier.closed:
        warn_once_per_machine(
            _logger,
            "this process builds its Sites of site %s anew: those that it had are closed, and their "
            "optimizers can run no more rounds (for several optimizers at once, build one Sites and give it "
            "to each as topology)",
            name,
        )
        earlier.close(f"site {name} began anew in the same process")


def default_topology() -> SiteTopology:
    """Who the sites are, if nobody says it in code."""
    return Sites() if are_named_by_variables() else Topology()


def are_named_by_variables() -> bool:
    """Whether a variable says who the sites are."""
    return any(os.environ.get(name) for name in _VARIABLES)


def _told(variable: str, what: str, example: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        argument = variable.removeprefix("LOCO_").lower()
        raise ValueError(
            f"nobody says {what}: give {argument}=… or set {variable} (e.g. {variable}={example})"
        )
    return value


def _at_least(given: int | None, sites: int, lighthouse: str | None) -> int | None:
    """None: sites do not come and go, or the lighthouse says how many are enough."""
    found = given if given is not None else os.environ.get("LOCO_AT_LEAST") or None
    if found is None:
        return None
    if lighthouse is not None:
        raise ValueError(
            "a lighthouse knows how many sites are enough (its --min_replicas): leave out at_least "
            "(LOCO_AT_LEAST)"
        )
    least = _number(found, "at_least")
    if least > sites:
        raise ValueError(f"at_least (LOCO_AT_LEAST) must be at most the {sites} sites, got {least}")
    return least


def _number(given: int | str, name: str = "sites") -> int:
    try:
        count = int(given)
    except ValueError:
        count = 0
    if count < 1 or count != float(given):
        raise ValueError(f"{name} (LOCO_{name.upper()}) must be a whole number >= 1, got {given!r}")
    return count
