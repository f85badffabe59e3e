"""Which exchange moves the fewest bytes, predicted from the last round; the codec is chosen by time."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loco import kernels
from loco.kernels import BLOCK, Entries

from ..wire.codecs import SPARSE, Codec
from ..wire.framing import Frames, Framing, slices_of
from ..wire.records import RECORD_BYTES, Announcement, fp32_of
from .codec_choice import NO_OPINION, CodecChoice

_logger = logging.getLogger(__name__)
MIN_ENTRIES = 1000  # to learn from
OVERLAP_EVERY_ROUNDS = 8  # looks at the overlap of the sites' entries
_OF_A_MESSAGE = 8 + 2 * 66  # bytes: its length, and headers of its packet and of the one that confirms it
EXCHANGES = ("auto", "gather", "owner", "dense")


def predicted_bytes(announcements: Sequence[Announcement]) -> dict[str, float]:
    """What a site will send, by exchange; of all sites' announcements, so that all predict the same."""
    sites, numel = len(announcements), announcements[0].numel
    payload = sum(announced.payload_bytes for announced in announcements) / sites
    sums = fp32_of(announcements[0].sums_bits)
    frames, of_slice = Frames.of(numel).count, Frames.of(slices_of(numel, sites)[0].stop).count
    peers, frame = sites - 1, RECORD_BYTES + _OF_A_MESSAGE
    return {
        "gather": peers * (payload + frames * frame),
        "owner": peers * ((payload + sums) / sites + 2 * of_slice * frame),
        "dense": peers * (2 * 4 * numel / sites + 2 * of_slice * frame),
    }


def is_worth_enclosing(mine: Announcement, sites: int) -> bool:
    """Whether all entries, in the message of the announcement, are fewer bytes than an exchange of them, as
    far as one site can tell."""
    enclosed = (sites - 1) * (mine.payload_bytes + RECORD_BYTES)
    return enclosed <= min(predicted_bytes([mine] * sites).values())


class ExchangeTuner:
    """What the last rounds of a site were like.

    Args:
        wire: the codec that the user asked for, or "auto".
        sites: R.
    """

    def __init__(self, wire: str, sites: int) -> None:
        self.wire = wire
        self.entry_bytes = {codec.name: codec.entry_bytes for codec in SPARSE.values()}
        self.spread = 1 + (sites - 1) / 3  # entries of the sums, over those of one site
        self._choice = CodecChoice(SPARSE.values())

    def state(self) -> dict[str, Any]:
        """What bytes are predicted from, so that a run that is resumed chooses as it would have. Which codec
        is quicker is found anew: it may be another machine."""
        return {"entry_bytes": self.entry_bytes.copy(), "spread": self.spread}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state()`; None keeps what is assumed at the start."""
        if state is not None:
            self.entry_bytes |= {name: float(size) for name, size in state["entry_bytes"].items()}
            self.spread = float(state["spread"])

    def codec(self) -> Codec:
        """The codec for this round."""
        if self.wire != "auto":
            return SPARSE[self.wire]
        chosen = self._choice.codec
        return chosen if chosen.quick or chosen.fallback is None else chosen.fallback

    def codec_time_ratio(self, round: int) -> int:
        """What this site announces in a round of how long its exchanges take."""
        return self._choice.time_ratio(round) if self.wire == "auto" else NO_OPINION

    def hear(self, announcements: Sequence[Announcement]) -> None:
        """What all sites announce in this round decides on the codec of the next one. Never fails: the last
        one will do."""
        with _only_logged("choose a codec"):
            self._choice.hear(announcements)

    def exchange(self, announcements: Sequence[Announcement]) -> str:
        """The exchange that is predicted to send the fewest bytes; the same on all sites."""
        predicted = predicted_bytes(announcements)
        return min(predicted, key=lambda name: predicted[name])

    def announced(self, codec: Codec, entries: int, numel: int) -> tuple[int, int]:
        """The bytes to expect of this site's payload, and of the sums."""
        each = self.entry_bytes[codec.name]
        return round(entries * each), round(min(entries * self.spread, numel) * each)

    def learn(
        self,
        codec: Codec,
        framing: Framing,
        seconds: float | None,
        contributions: Sequence[Entries],
        own: Entries,
    ) -> None:
        """Never fails: what can't be learned is not worth a round.

        Args:
            framing: with which this site's entries were coded.
            seconds: of the whole exchange. The first frame is coded before anything is sent, and the last one
                read when all has come; with few frames that is most of the work. None: there was no exchange,
                the entries came with the announcements.
            contributions: all sites' entries, or their sums alone.
        """
        with _only_logged("learn from a round"):
            if codec.sizes_are_known:
                return
            if not own.values.numel():
                return  # how long it took says nothing of an entry
            if framing.coded_entries and seconds is not None:  # a site that is alone exchanges nothing
                self._choice.learn(codec, seconds / own.values.numel())
            if framing.coded_entries >= MIN_ENTRIES:
                self.entry_bytes[codec.name] = framing.coded_bytes / framing.coded_entries
            entries, sums = own.values.numel(), contributions[0].values.numel()
            if len(contributions) > 1:
                if framing.round % OVERLAP_EVERY_ROUNDS != 1:
                    return  # it takes long, for what changes slowly
                entries, sums = _sampled(own, contributions, framing.known.numel)
            if entries >= MIN_ENTRIES:
                self.spread = sums / entries


@contextmanager
def _only_logged(what: str) -> Iterator[None]:
    """Around what no round may fail for."""
    try:
        yield
    except Exception:
        _logger.warning("the exchange's tuner could not %s", what, exc_info=True)


def _sampled(own: Entries, contributions: Sequence[Entries], numel: int) -> tuple[int, int]:
    """The entries of one site, and of all together, in some stretches of the vector."""
    length, entries, sums = 1 << 14, 0, 0
    for first in range(0, numel, max(length, numel // (16 * BLOCK) * BLOCK)):
        at = slice(first, min(first + length, numel))
        entries += own.cut(at).values.numel()
        sums += kernels.add_up([c.cut(at) for c in contributions], at.stop - at.start).values.numel()
    return entries, sums
