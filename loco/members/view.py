"""Who takes part in a round, as one rank sees it. A round does not know which `Membership` formed its
view."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..coordination.rendezvous import Reconnects
from ..errors import TransportError
from ..net.transport import Transport
from .repeats import Repeats


class VerdictLog(Protocol):
    """The verdicts on rounds: one word for each round, written once, the same for all ranks."""

    def prepare(self, number: int) -> None:
        """Before this rank votes on a round: drop a verdict that is left from before a state was loaded."""
        ...

    def on(self, number: int, wish: str) -> str:
        """-> the verdict on a round: this rank's wish, unless another rank was quicker.

        Raises:
            TransportError: the verdict can't be learned now, and can be asked for again.
        """
        ...


class StatusReporter(Protocol):
    """What this rank tells those who wait for it."""

    def say(self, doing: str) -> None: ...

    def leave(self, why: str, link: str = "") -> None: ...


class Handover(Protocol):
    """How θ and m pass from the sites that hold them to those that have just come, over a view's links.

    Attributes:
        link: to all members, by their index.
        source: the member that gives this site its state; None: this site holds it.
        receivers: the members that this site gives it to.
    """

    @property
    def link(self) -> Transport: ...

    @property
    def source(self) -> int | None: ...

    @property
    def receivers(self) -> tuple[int, ...]: ...

    def announce(self) -> None:
        """Tell the receivers that this site is ready to send."""
        ...

    def await_source(self) -> None:
        """Wait until the source is ready to send."""
        ...

    def name_of(self, member: int) -> str: ...


@dataclass(kw_only=True)
class View:
    """The members of one set of links.

    Attributes:
        name: of these links, and of no others.
        site, num_sites: this site's number, and R.
        across: to the same rank in the other sites.
        inside: to the other ranks of this site.
        liveness: tells the others what this rank does.
        verdicts: on the rounds over these links.
        site_names: by site, where sites have names; otherwise empty.
        handover: where sites may come while others train; None where all begin together.
        runs_round: there is a round to run, and this site takes part in it.
        committed: what became of the round that this rank was in doubt about; None: not known here.
        is_whole: no link of it has been given up.
    """

    name: str
    site: int
    num_sites: int
    across: Transport
    inside: Transport
    liveness: StatusReporter
    verdicts: VerdictLog
    site_names: tuple[str, ...] = ()
    handover: Handover | None = None
    runs_round: bool = True
    committed: bool | None = None
    is_whole: bool = True

    @property
    def bytes_so_far(self) -> tuple[int, int, int]:
        """Sent across the sites, received across the sites, sent inside the site."""
        return self.across.sent_bytes, self.across.received_bytes, self.inside.sent_bytes


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where this site stands when it asks for a view.

    Attributes:
        rounds_done: −1 if it holds only a part of θ.
        digest: computes that of θ.
        ready: it has come to run a round; otherwise it has come for θ alone.
        committed: the name of the view in which it made its last round; "" if this process made none.
        doubt: the name of the view of a round of which it has everything but the verdict; "" if there is
            none.
    """

    rounds_done: int
    digest: Callable[[], str]
    ready: bool
    committed: str = ""
    doubt: str = ""


class Membership(Protocol):
    """Forms the views of one optimizer, one after the other.

    Attributes:
        others_may_be_ahead: sites go on without this one. Then it need not know what became of a round before
            its weights move again, because the next view brings the others' θ; and a state that is loaded
            may be behind theirs.
    """

    others_may_be_ahead: bool

    def form(self, standing: Standing) -> View:
        """The view for the next round: today's as long as it will do, or a new one, with all its links.

        Raises:
            LocoError: there is none now.
        """
        ...

    def form_site(self) -> View:
        """Where a site has several ranks: a view over whose `inside` they talk, before they ask for that of a
        round. It is the same one as long as it will do.

        Raises:
            TransportError: a rank of it is lost.
        """
        ...

    def give_up(self, why: str) -> None:
        """Hang up the links of the latest view, so that members who wait for this rank learn of it."""
        ...

    def stop(self, why: str) -> None:
        """As `give_up`, and tell members that wait for new links that this rank does not come before it is
        called again: it raises an error, and so do they."""
        ...

    def attempts(self) -> Repeats: ...

    def reconnects_by(self, user: Reconnects) -> None:
        """`user` forms a new view when other ranks wait for one, though its own links may be whole: those of
        a site of several ranks may, after a round that counts, if they lost each other before they had shared
        θ."""
        ...


class Agreement(Protocol):
    """How ranks agree outside of rounds: all of them (`Rendezvous`), or one that is alone (`Alone`)."""

    def exchange_notes(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        """As `Rendezvous.exchange_notes`; so are the others."""
        ...

    def number_of(self, user: Any) -> int: ...

    def missed(self, phase: str) -> bool: ...

    def reconnect(self) -> None: ...

    def called(self, rank: int) -> str:
        """A rank, for errors."""
        ...


class SiteTopology(Protocol):
    """Who the sites are, as a user says it.

    Attributes:
        num_sites: R.
        site: this rank's site.
        ranks_per_site: equal on all sites.
        rank_in_site: this rank's number inside its site.
        is_elastic: sites come and go while others train.
        site_group: torch's, of the ranks of this site; None: a single process outside of torch.distributed.
        rendezvous: by which the ranks that save together agree outside of rounds.
        closed: why it is closed; "" as long as it is open.
    """

    @property
    def num_sites(self) -> int: ...

    @property
    def site(self) -> int: ...

    @property
    def ranks_per_site(self) -> int: ...

    @property
    def rank_in_site(self) -> int: ...

    @property
    def is_elastic(self) -> bool: ...

    @property
    def site_group(self) -> dist.ProcessGroup | None: ...

    @property
    def rendezvous(self) -> Agreement: ...

    @property
    def closed(self) -> str: ...

    def all_ranks(self) -> Transport:
        """The link to every rank that is built together with this one."""
        ...

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> Membership:
        """A membership of one optimizer, whose state lives on `device`.

        Args:
            setup: what all sites must have in common.
        """
        ...

    def seat(self) -> dict[str, Any]:
        """Who this rank is, as its state remembers it."""
        ...

    def close(self) -> None:
        """Leave, for a program that goes on without it."""
        ...


def require_open(topology: SiteTopology) -> None:
    """For an optimizer that needs the other sites.

    Raises:
        TransportError: its topology is closed.
    """
    if topology.closed:
        raise TransportError(
            f"the sites of this optimizer are closed: {topology.closed}. To go on, build new ones and a new "
            f"optimizer, on all sites",
            lasting=True,
            has_remedy=True,
        )
