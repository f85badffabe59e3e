"""Which exchange moves the fewest bytes, and which code is quickest: predicted each round, from the last."""

from collections.abc import Sequence

from loco import kernels
from loco.kernels import BLOCK, Entries

from .codec import FAST, SPARSE, TIGHT, Codec
from .frames import Frames
from .transfer import Transfer
from .wire import HEADER_BYTES, Header

ENOUGH = 1000  # entries, to learn from
CLEARLY = 1.2
EXCHANGES = ("auto", "gather", "owner", "dense")


def predicted_bytes(headers: Sequence[Header]) -> dict[str, float]:
    """What a site will send, by exchange; of all sites' announcements, so that all predict the same."""
    sites, numel = len(headers), headers[0].numel
    payload = sum(header.body_bytes for header in headers) / sites
    sums = headers[0].checksum
    frames, of_slice = Frames.of(numel).count, Frames.of(-(-numel // sites)).count
    peers = sites - 1
    return {
        "gather": peers * (payload + frames * HEADER_BYTES),
        "owner": peers * ((payload + sums) / sites + 2 * of_slice * HEADER_BYTES),
        "dense": peers * (2 * 4 * numel / sites + 2 * of_slice * HEADER_BYTES),
    }


class Habits:
    """What the last rounds of a site were like.

    Args:
        wire: the code that the user asked for, or "auto".
        sites: R.
    """

    def __init__(self, wire: str, sites: int) -> None:
        self.wire = wire
        self.entry_bytes = {FAST.name: 5.1, TIGHT.name: 2.4}
        self.spread = 1 + (sites - 1) / 3  # entries of the sums, over those of one site
        self._link_speed: float | None = None  # bytes per second
        self._coding: float | None = None  # seconds that the tight code took
        self._since_tight = 0  # rounds
        self._tight_bytes = 0.0  # that a round sends in the tight code

    def codec(self) -> Codec:
        """The code for this round: with "auto" the one that is predicted to take less time.

        Coding and sending overlap, so a round takes the longer of the two. The fast code takes hardly any
        time, but the link for longer; and since others use the link too, it must be clearly the quicker.
        """
        if self.wire != "auto":
            return SPARSE[self.wire]
        if not kernels.packs_fast():
            return FAST
        if self._coding is None or self._since_tight >= 64:
            return TIGHT  # find out, and now and then whether it still takes as long
        if self._link_speed is None:
            return FAST  # the link never kept the tight code waiting
        tight = max(self._tight_bytes / self._link_speed, self._coding)
        fast = self._tight_bytes / self._ratio() / self._link_speed
        return TIGHT if tight <= CLEARLY * fast else FAST

    def announced(self, codec: Codec, entries: int, numel: int) -> tuple[int, int]:
        """The bytes to expect of this site's payload, and of the sums."""
        each = self.entry_bytes[codec.name]
        return round(entries * each), round(min(entries * self.spread, numel) * each)

    def learn(
        self, codec: Codec, work: Transfer, contributions: list[Entries], own: Entries, moved: int
    ) -> None:
        """
        Args:
            contributions: all sites' entries, or their sums alone.
            moved: the bytes that this site sent.
        """
        framing = work.framing
        self._link_speed = work.link_speed or self._link_speed
        if codec.name not in SPARSE:
            return
        if framing.coded_entries >= ENOUGH:
            self.entry_bytes[codec.name] = framing.coded_bytes / framing.coded_entries
        if codec is TIGHT:
            self._coding, self._since_tight = work.coding_seconds, 0
        self._since_tight += 1
        self._tight_bytes = moved if codec is TIGHT else moved * self._ratio()
        entries, sums = own.values.numel(), contributions[0].values.numel()
        if len(contributions) > 1:
            entries, sums = _sampled(own, contributions, framing.known.anchor.numel())
        if entries >= ENOUGH:
            self.spread = sums / entries

    def _ratio(self) -> float:
        return self.entry_bytes[TIGHT.name] / self.entry_bytes[FAST.name]


def _sampled(own: Entries, contributions: list[Entries], numel: int) -> tuple[int, int]:
    """The entries of one site, and of all together, in some stretches of the vector."""
    length, entries, sums = 1 << 14, 0, 0
    for first in range(0, numel, max(length, numel // (64 * BLOCK) * BLOCK)):
        at = slice(first, min(first + length, numel))
        entries += own.cut(at).values.numel()
        sums += kernels.add_up([c.cut(at) for c in contributions], at.stop - at.start).values.numel()
    return entries, sums
