"""Which exchange moves the fewest bytes, predicted from the last round; which code is quickest, by trying."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from loco import kernels
from loco.kernels import BLOCK, Entries

from ..wire.codecs import FAST, SPARSE, TIGHT, Codec
from ..wire.framing import Frames, slices_of
from ..wire.records import RECORD_BYTES, Announcement
from .transfer import Transfer

_logger = logging.getLogger(__name__)
ENOUGH = 1000  # entries, to learn from
CLEARLY = 1.2
SAMPLED = 8  # rounds, of which one is looked at for the overlap of sites' entries
AGAIN = 32  # rounds, after which a code is tried again
EXCHANGES = ("auto", "gather", "owner", "dense")


def predicted_bytes(announcements: Sequence[Announcement]) -> dict[str, float]:
    """What a site will send, by exchange; of all sites' announcements, so that all predict the same."""
    sites, numel = len(announcements), announcements[0].numel
    payload = sum(announced.payload_bytes for announced in announcements) / sites
    sums = announcements[0].sums_bytes
    frames, of_slice = Frames.of(numel).count, Frames.of(slices_of(numel, sites)[0].stop).count
    peers = sites - 1
    return {
        "gather": peers * (payload + frames * RECORD_BYTES),
        "owner": peers * ((payload + sums) / sites + 2 * of_slice * RECORD_BYTES),
        "dense": peers * (2 * 4 * numel / sites + 2 * of_slice * RECORD_BYTES),
    }


class ExchangeTuner:
    """What the last rounds of a site were like.

    Args:
        wire: the code that the user asked for, or "auto".
        sites: R.
    """

    def __init__(self, wire: str, sites: int) -> None:
        self.wire = wire
        self.entry_bytes = {FAST.name: 5.1, TIGHT.name: 2.4}
        self.spread = 1 + (sites - 1) / 3  # entries of the sums, over those of one site
        self._seconds: dict[str, float] = {}  # of an exchange for each of this site's entries, by code
        self._codec: Codec = FAST  # of the last round
        self._since: dict[str, int] = {}  # rounds since a code was tried

    def state(self) -> dict[str, Any]:
        """What bytes are predicted from, so that a run that is resumed chooses as it would have. Which code
        is quicker is found anew: it may be another machine."""
        return {"entry_bytes": self.entry_bytes.copy(), "spread": self.spread}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state()`; None keeps what is assumed at the start."""
        if state is not None:
            self.entry_bytes |= {name: float(size) for name, size in state["entry_bytes"].items()}
            self.spread = float(state["spread"])

    def codec(self) -> Codec:
        """The code for this round. Never fails: the last one will do."""
        try:
            self._codec = self._quickest()
        except Exception:
            _logger.warning("the exchange's tuner could not choose a code", exc_info=True)
        return self._codec

    def _quickest(self) -> Codec:
        """With "auto" the one whose exchange took less time when it was last tried.

        Coding and sending overlap, here and at the peers, and what a round takes only a round can tell. So
        each code is tried, and now and then again. The fast one must be clearly quicker: it needs the link
        for longer, which others use too.
        """
        if self.wire != "auto":
            return SPARSE[self.wire]
        if not kernels.packs_fast():
            return FAST
        for codec in (TIGHT, FAST):
            if self._since.get(codec.name, AGAIN) >= AGAIN:
                return codec
        quicker = CLEARLY * self._seconds[FAST.name] < self._seconds[TIGHT.name]
        return FAST if quicker else TIGHT

    def exchange(self, announcements: Sequence[Announcement]) -> str:
        """The exchange that is predicted to send the fewest bytes; the same on all sites."""
        predicted = predicted_bytes(announcements)
        return min(predicted, key=lambda name: predicted[name])

    def announced(self, codec: Codec, entries: int, numel: int) -> tuple[int, int]:
        """The bytes to expect of this site's payload, and of the sums."""
        each = self.entry_bytes[codec.name]
        return round(entries * each), round(min(entries * self.spread, numel) * each)

    def learn(self, codec: Codec, work: Transfer, contributions: Sequence[Entries], own: Entries) -> None:
        """Never fails: what can't be learned is not worth a round.

        Args:
            contributions: all sites' entries, or their sums alone.
        """
        try:
            self._learn(codec, work, contributions, own)
        except Exception:
            _logger.warning("the exchange's tuner could not learn from a round", exc_info=True)

    def _learn(self, codec: Codec, work: Transfer, contributions: Sequence[Entries], own: Entries) -> None:
        framing = work.framing
        self._since = {name: rounds + 1 for name, rounds in self._since.items()} | {codec.name: 0}
        if codec.name not in SPARSE:
            return
        if not own.values.numel():
            return  # how long it took says nothing of an entry
        self._seconds[codec.name] = work.seconds / own.values.numel()
        if framing.coded_entries >= ENOUGH:
            self.entry_bytes[codec.name] = framing.coded_bytes / framing.coded_entries
        entries, sums = own.values.numel(), contributions[0].values.numel()
        if len(contributions) > 1:
            if framing.round % SAMPLED != 1:
                return  # it takes long, for what changes slowly
            entries, sums = _sampled(own, contributions, framing.known.anchor.numel())
        if entries >= ENOUGH:
            self.spread = sums / entries


def _sampled(own: Entries, contributions: Sequence[Entries], numel: int) -> tuple[int, int]:
    """The entries of one site, and of all together, in some stretches of the vector."""
    length, entries, sums = 1 << 14, 0, 0
    for first in range(0, numel, max(length, numel // (64 * BLOCK) * BLOCK)):
        at = slice(first, min(first + length, numel))
        entries += own.cut(at).values.numel()
        sums += kernels.add_up([c.cut(at) for c in contributions], at.stop - at.start).values.numel()
    return entries, sums
