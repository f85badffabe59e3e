"""Which codec takes the least time, found by trying: each site measures, and all choose alike."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..wire.codecs import Codec
from ..wire.records import Announcement

SWITCH_RATIO = 1.1  # how much quicker a codec must be that sends more bytes
RETRY_AFTER_ROUNDS = 16  # at least, before a slower codec is tried again
RETRY_BUDGET = 0.02  # share of the time that trying it may cost
ROUNDS_NEEDED, ROUNDS_REMEMBERED = 2, 3  # try each codec twice; compare the fastest of the last three
ROUNDS_PER_TRIAL = 3  # until it is known that there were ROUNDS_NEEDED
STALE_AFTER_ROUNDS = 8  # what a codec took no longer counts as what it takes
ONE_ROUND_RATIO = 1.25  # a codec that took so many times as long when tried again needs no second round
# What a site announces: how much longer an entry takes in the round's challenger than in the codec that it is
# compared with, in sixteenths of a factor of two; or one of these.
NEEDS_FIRST, NEEDS_CHALLENGER, NO_OPINION = -128, 127, 126
_STEPS, _MOST = 16, 120


@dataclass
class _Measured:
    """What a site knows of a codec.

    seconds: for each of its entries, of the last exchanges.
    used: the last measured round in which it was.
    ratio: the logarithm of its time over the first codec's, when both were known last.
    ratio_before: and the time before.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS_REMEMBERED))
    used: int = 0
    ratio: float | None = None
    ratio_before: float | None = None

    @property
    def log_seconds(self) -> float:
        """What disturbs a round makes it longer, so the quickest one tells most."""
        return math.log2(min(self.seconds))


class CodecChoice:
    """The codec of the next round.

    Coding and sending overlap, here and at the peers, and what a round takes only a round can tell. So each
    codec is tried, and the slower ones again after 16 rounds, or 32, 64, …: the longer one takes, the less
    often. All others are compared with the one of the fewest bytes, one of them in each round, and must be
    clearly quicker: they need the link for longer, which others use too.

    Args:
        codecs: at least two; the same on all sites.

    Attributes:
        codec: of the next round.
    """

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._codecs = sorted(codecs, key=lambda codec: (codec.entry_bytes, codec.id))
        self._first, *self._challengers = self._codecs
        self._measured = {codec.id: _Measured() for codec in self._codecs}
        self._measured[self._first.id].ratio = 0.0
        self._rounds = 0  # that were measured
        self._heard = {self._first.id: 0.0}  # ratios by codec, of all sites
        self.codec = self._first

    def time_ratio(self, number: int) -> int:
        """What this site announces in a round of how long its exchanges take."""
        challenger = self._challenger_of(number)
        if not (self._first.quick and challenger.quick):
            return NO_OPINION
        first, other = self._measured[self._first.id], self._measured[challenger.id]
        for measured, needed in ((first, NEEDS_FIRST), (other, NEEDS_CHALLENGER)):
            if len(measured.seconds) < ROUNDS_NEEDED and (
                other.ratio is None or abs(other.log_seconds - first.log_seconds) < math.log2(ONE_ROUND_RATIO)
            ):
                return needed
        ratio, known = other.log_seconds - first.log_seconds, other.ratio or 0.0
        # How long an entry takes changes over the rounds, for all codecs. Of one that is not in use it is
        # assumed to have changed as much, or as little, as speaks for it: else it is not tried again.
        if self._is_stale(other):
            ratio = known if self._is_stale(first) else min(ratio, known)
        elif self._is_stale(first):
            ratio = max(ratio, known)
        return max(-_MOST, min(_MOST, round(_STEPS * ratio)))

    def learn(self, codec: Codec, seconds: float) -> None:
        """An exchange in this codec took so long for each of this site's entries."""
        self._rounds += 1
        measured = self._measured[codec.id]
        compared = self._challengers if codec is self._first else [codec]
        if self._is_stale(measured):
            measured.seconds.clear()
            for challenger in compared:
                other = self._measured[challenger.id]
                other.ratio_before = other.ratio
        measured.used = self._rounds
        measured.seconds.append(seconds)
        for challenger in compared:
            self._compare(self._measured[challenger.id])

    def hear(self, announcements: Sequence[Announcement]) -> None:
        """Choose by what all sites announce in a round: how long an exchange takes depends on all sites'
        codecs. If no site that sends anything has an opinion, the codec stays."""
        said = [one.codec_time_ratio for one in announcements if one.entries]
        ratios = [ratio for ratio in said if ratio != NO_OPINION]
        if not ratios:
            return
        challenger = self._challenger_of(announcements[0].round)
        if NEEDS_FIRST in ratios:
            self.codec = self._first
        elif NEEDS_CHALLENGER in ratios:
            self.codec = challenger
        else:
            self._heard[challenger.id] = sum(ratios) / len(ratios) / _STEPS
            self.codec = self._codec_of(announcements[0].round + 1)

    def _codec_of(self, number: int) -> Codec:
        """The quickest one, or one that is due to be tried again."""
        heard = self._heard
        known = [codec for codec in self._codecs if codec.id in heard]
        quickest = min(known, key=lambda codec: heard[codec.id])
        if SWITCH_RATIO * 2.0 ** heard[quickest.id] >= 1:
            quickest = self._first
        known.remove(quickest)
        for k, codec in enumerate(known):  # each in a round of its own
            times = 2.0 ** (heard[codec.id] - heard[quickest.id])
            if (number - k) % _retry_after(times) == 0:
                return codec
        return quickest

    def _challenger_of(self, number: int) -> Codec:
        return self._challengers[number % len(self._challengers)]

    def _is_stale(self, measured: _Measured) -> bool:
        return self._rounds - measured.used > STALE_AFTER_ROUNDS

    def _compare(self, challenger: _Measured) -> None:
        """With the first codec; or if that was not used lately, with another one whose ratio is known."""
        enough = ROUNDS_NEEDED if challenger.ratio is None else 1
        fresh = [
            one for one in self._measured.values() if len(one.seconds) >= enough and not self._is_stale(one)
        ]
        others = (one for one in fresh if one is not challenger and one.ratio is not None)
        other = next(others, None)
        if challenger not in fresh or other is None or other.ratio is None:
            return
        now, before = challenger.log_seconds - other.log_seconds + other.ratio, challenger.ratio_before
        if before is not None and now * before > 0 and abs(now) > abs(before):
            now = (now + before) / 2  # it may have been disturbed, and would wait long for the next try
        challenger.ratio = now


def _retry_after(times: float) -> int:
    """Rounds until a codec is tried again that takes so many times as long as the quickest one."""
    lost = (times - 1) * (1 if times > ONE_ROUND_RATIO else ROUNDS_PER_TRIAL)
    # Each twice as many as before: if it is to be tried sooner after all, the round has not gone by.
    doublings = math.ceil(math.log2(max(1.0, lost / RETRY_BUDGET / RETRY_AFTER_ROUNDS)))
    return RETRY_AFTER_ROUNDS << doublings
