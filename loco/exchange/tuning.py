"""Which exchange moves the fewest bytes, predicted from the last round; which code is quickest, by trying."""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loco import kernels
from loco.kernels import BLOCK, Entries

from ..wire.codecs import FAST, SPARSE, TIGHT, Codec
from ..wire.framing import Frames, Framing, slices_of
from ..wire.records import RECORD_BYTES, Announcement

_logger = logging.getLogger(__name__)
ENOUGH = 1000  # entries, to learn from
CLEARLY = 1.1
SAMPLED = 8  # rounds, of which one is looked at for the overlap of sites' entries
AGAIN = 16  # rounds at least, after which the slower code is tried again
SPENT = 0.02  # share of the time that trying it may cost
TRIED, REMEMBERED = 2, 3  # try each codec twice; compare the fastest of the last three rounds
TRIES = 3  # rounds until it is known that there were TRIED
STALE = 8  # rounds after which what a code took no longer counts as what it takes
CLOSE = 1.25  # if a code that is tried again takes more than so many times as long, one round is enough
# What a site announces of how long it takes: how much longer an entry takes in the fast code than in the
# tight one, in sixteenths of a factor of two; or one of these.
NEEDS_TIGHT, NEEDS_FAST, NO_OPINION = -128, 127, 126
_STEPS, _MOST = 16, 120
_OF_A_MESSAGE = 8 + 2 * 66  # bytes: its length, and headers of its packet and of the one that confirms it
EXCHANGES = ("auto", "gather", "owner", "dense")


def predicted_bytes(announcements: Sequence[Announcement]) -> dict[str, float]:
    """What a site will send, by exchange; of all sites' announcements, so that all predict the same."""
    sites, numel = len(announcements), announcements[0].numel
    payload = sum(announced.payload_bytes for announced in announcements) / sites
    sums = announcements[0].sums_bytes
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


def next_codec(announcements: Sequence[Announcement]) -> Codec | None:
    """The code of the next round, of all sites' announcements in this one, so that all choose alike: how long
    an exchange takes depends on all sites' codes. None: no site that sends anything has an opinion.

    Coding and sending overlap, here and at the peers, and what a round takes only a round can tell. So each
    code is tried, and the slower one again after 16 rounds, or 32, 64, …: the longer it takes, the less
    often. The fast one must be clearly quicker: it needs the link for longer, which others use too.
    """
    leans = [one.lean for one in announcements if one.lean != NO_OPINION and one.entries]
    if not leans:
        return None
    for needed, codec in ((NEEDS_TIGHT, TIGHT), (NEEDS_FAST, FAST)):
        if needed in leans:
            return codec
    ratio = 2.0 ** (sum(leans) / len(leans) / _STEPS)
    quicker, other = (FAST, TIGHT) if CLEARLY * ratio < 1 else (TIGHT, FAST)
    times = ratio if quicker is TIGHT else 1 / ratio
    lost = (times - 1) * (1 if times > CLOSE else TRIES)
    # Each twice as many as before: if it is to be tried sooner after all, the round has not gone by.
    again = AGAIN << max(0, math.ceil(math.log2(max(1.0, lost / SPENT / AGAIN))))
    return other if (announcements[0].round + 1) % again == 0 else quicker


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
        # Of the last exchanges in a code, for each of this site's entries.
        self._seconds = {name: deque[float](maxlen=REMEMBERED) for name in SPARSE}
        self._rounds = 0  # from which something was learned of a code
        self._used = dict.fromkeys(SPARSE, 0)  # in which of them last
        self._compared: float | None = None  # the logarithm of fast over tight, when both were known last
        self._compared_before: float | None = None  # and the time before
        self._codec: Codec = TIGHT  # of the next round

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
        """The code for this round."""
        if self.wire != "auto":
            return SPARSE[self.wire]
        return self._codec if kernels.packs_fast() else FAST

    def lean(self) -> int:
        """What this site announces of how long its exchanges take."""
        if self.wire != "auto" or not kernels.packs_fast():
            return NO_OPINION
        for codec, needed in ((TIGHT, NEEDS_TIGHT), (FAST, NEEDS_FAST)):
            if len(self._seconds[codec.name]) < TRIED and (self._compared is None or self._is_close()):
                return needed
        lean = self._comparison()
        # How long an entry takes changes over the rounds, for both codes. Of the one that is not in use it is
        # assumed to have changed as much, or as little, as speaks for it: else it is not tried again.
        if self._is_stale(FAST):
            lean = min(lean, self._compared or 0.0)
        elif self._is_stale(TIGHT):
            lean = max(lean, self._compared or 0.0)
        return max(-_MOST, min(_MOST, round(_STEPS * lean)))

    def _comparison(self) -> float:
        """What disturbs a round makes it longer, so the quickest one tells most."""
        return math.log2(min(self._seconds[FAST.name]) / min(self._seconds[TIGHT.name]))

    def _is_close(self) -> bool:
        return abs(self._comparison()) < math.log2(CLOSE)

    def _is_stale(self, codec: Codec) -> bool:
        return self._rounds - self._used[codec.name] > STALE

    def _took(self, codec: Codec, seconds: float) -> None:
        """An exchange in this code took so long for each of this site's entries."""
        self._rounds += 1
        if self._is_stale(codec):
            self._seconds[codec.name].clear()
            self._compared_before = self._compared
        self._used[codec.name] = self._rounds
        self._seconds[codec.name].append(seconds)
        enough = TRIED if self._compared is None else 1
        if any(len(self._seconds[one.name]) < enough or self._is_stale(one) for one in (FAST, TIGHT)):
            return
        now, before = self._comparison(), self._compared_before
        if before is not None and now * before > 0 and abs(now) > abs(before):
            now = (now + before) / 2  # it may have been disturbed, and would wait long for the next try
        self._compared = now

    def hear(self, announcements: Sequence[Announcement]) -> None:
        """What all sites announce in this round decides on the code of the next one. Never fails: the last
        one will do."""
        with _only_logged("choose a code"):
            self._codec = next_codec(announcements) or self._codec

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
            if codec.name not in SPARSE:
                return
            if not own.values.numel():
                return  # how long it took says nothing of an entry
            if framing.coded_entries and seconds is not None:  # a site that is alone exchanges nothing
                self._took(codec, seconds / own.values.numel())
            if framing.coded_entries >= ENOUGH:
                self.entry_bytes[codec.name] = framing.coded_bytes / framing.coded_entries
            entries, sums = own.values.numel(), contributions[0].values.numel()
            if len(contributions) > 1:
                if framing.round % SAMPLED != 1:
                    return  # it takes long, for what changes slowly
                entries, sums = _sampled(own, contributions, framing.known.numel)
            if entries >= ENOUGH:
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
