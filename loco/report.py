"""What a round did."""

from collections.abc import Mapping
from dataclasses import dataclass


def dense_bytes(numel: int, sites: int) -> int:
    """What each site sends in a ring all-reduce of FP32."""
    return 2 * (sites - 1) * 4 * numel // sites


@dataclass(frozen=True, kw_only=True)
class SiteTotals:
    """What all ranks of this site sent together in one round.

    Attributes:
        numel, entries, sent_bytes, dense_bytes: as of `SyncReport`, summed over the ranks.
    """

    numel: int
    entries: int
    sent_bytes: int
    dense_bytes: int

    @property
    def density(self) -> float:
        """entries / numel."""
        return self.entries / self.numel if self.numel else 0.0

    @property
    def below_dense(self) -> float:
        """How many times fewer bytes than a dense all-reduce; 0 if nothing was sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One round as this rank saw it; `print` shows it in a line.

    Bytes are those that this rank handed to the transport and took from it, headers and sizes included. In a
    site of several ranks each rank reports on its own slice of the parameters, and `site` is their sum.

    Attributes:
        round: how many rounds are done, this one included.
        numel: parameters that this rank exchanges.
        entries: how many of them it sent.
        density: entries / numel.
        wire: how the entries were coded: "tight", "fast", "float32", "bfloat16" or "int8".
        exchange: how they travelled: "gather", "owner" or "dense"; "rejoin" if this site received θ and m
            from another site instead of taking part.
        payload_bytes: this rank's coded entries with their headers, without the slice that it sums itself.
        sent_bytes: sent to the other sites: payloads, headers and votes.
        received_bytes: received from the other sites.
        site_bytes: sent inside the site: digests, votes and this rank's slice of the new anchor.
        dense_bytes: what a ring all-reduce of FP32 would have sent: 2(R−1)/R · 4 · numel.
        update_norms: for each site, the L2 norm of what it would send.
        left_out: the names of the sites whose update was too large for `outlier_factor`; their numbers, if
            they have no names.
        outer_lr: α.
        residual_norm: the L2 norm of what this rank withholds after the round.
        seconds: how long each phase took: "encode", "exchange" and "apply"; or "rejoin".
        waited: seconds of the exchange that passed until all sites had come to the round. Where rounds
            overlap: seconds for which training stood still until this one had come.
        in_flight: where rounds overlap, seconds that this one travelled beside the inner steps of the next;
            its `seconds` of "exchange" are those for which training stood still.
        site: the totals of this site.
    """

    round: int
    numel: int
    entries: int
    density: float
    wire: str
    exchange: str
    payload_bytes: int
    sent_bytes: int
    received_bytes: int
    site_bytes: int
    dense_bytes: int
    update_norms: tuple[float, ...]
    left_out: tuple[str, ...]
    outer_lr: float
    residual_norm: float
    seconds: Mapping[str, float]
    waited: float
    site: SiteTotals
    in_flight: float = 0.0

    def __str__(self) -> str:
        site = self.site
        share = f", {site.sent_bytes / site.dense_bytes:.1%} of dense" if site.dense_bytes else ""
        left_out = f", without site {', '.join(self.left_out)}" if self.left_out else ""
        phases = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
        if self.in_flight:
            phases += f", {self.in_flight:.3f} s in flight"
        return (
            f"round {self.round}: sent {site.density:.2%} of {site.numel:,} entries in "
            f"{site.sent_bytes:,} bytes{share} ({self.exchange}, {self.wire}){left_out}; {phases}, of which "
            f"it waited {self.waited:.3f} s for all sites to come"
        )
