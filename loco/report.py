"""What a round did."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One round as this rank saw it. Bytes are those handed to and taken from the transport.

    With several ranks per site the figures are of this rank's slice of the parameters.
    """

    round: int  # rounds done, this one included
    numel: int  # parameters this rank exchanges
    entries: int  # of which it sent
    density: float  # entries / numel
    wire: str  # the code of what it sent: tight, fast, float32, bfloat16 or int8
    # gather, owner or dense: chosen by predicted bytes unless the user did. rejoin: it was given θ instead
    exchange: str
    payload_bytes: int  # this site's coded entries, with headers, but for a slice that it sums itself
    sent_bytes: int  # across the sites: payloads, headers and votes
    received_bytes: int
    site_bytes: int  # sent inside the site: a digest, its votes and its part of the new anchor
    dense_bytes: int  # what a ring all-reduce of FP32 would have sent: 2(R−1)/R · 4 · numel
    update_norms: tuple[float, ...]  # by site, the L2 norm of what it would send
    left_out: tuple[int, ...]  # sites whose update was too large for `outlier_factor`
    residual_norm: float  # L2 norm of what is withheld after the round
    seconds: Mapping[str, float]  # by phase: encode, exchange, apply

    def __str__(self) -> str:
        share = f", {self.sent_bytes / self.dense_bytes:.1%} of dense" if self.dense_bytes else ""
        left_out = f", without site {', '.join(map(str, self.left_out))}" if self.left_out else ""
        phases = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
        return (
            f"round {self.round}: sent {self.density:.2%} of {self.numel:,} entries in "
            f"{self.sent_bytes:,} bytes{share} ({self.exchange}, {self.wire}){left_out}; {phases}"
        )
