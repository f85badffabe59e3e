"""What a round will take, from what was measured of links and machines.

The slowest part decides, whether link or coding, since frames travel while others are coded; the first frame
is coded before and the last one read after. On top come the waits for the network: the announcements, the
votes, the sums that leave only once entries have come, and the question to the store for the verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...exchange.codec_choice import SWITCH_RATIO
from ...exchange.stream import AHEAD
from ...exchange.tuning import predicted_bytes
from ...wire.codecs import FAST
from ...wire.framing import Frames, slices_of
from ...wire.records import Announcement, fp32_bits
from .links import Points, rate_of
from .methods import Method
from .work import Work


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured, of the slowest.

    one_way: seconds of a short message.
    store: seconds of a request to the store.
    together: as of `Measured`.
    """

    one_way: float
    store: float
    together: Points

    def sending(self, size: float) -> float:
        """Seconds to send so many bytes in all while all others do the same, until the last has come."""
        known = [(0, self.one_way), *self.together]
        if size >= known[-1][0]:
            last, seconds = known[-1]
            return seconds + (size - last) / rate_of(known)
        k = next(k for k, (bytes_, _) in enumerate(known) if size < bytes_)
        (less, sooner), (more, later) = known[k - 1], known[k]
        return sooner + (later - sooner) * (size - less) / (more - less)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one round on one rank.

    sent_bytes: across the sites.
    seconds: by what takes them: encode, link (bytes), code (what can't be done meanwhile), waits, apply.
    """

    method: str
    wire: str
    exchange: str
    sent_bytes: float
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def predict(method: Method, numel: int, sites: int, costs: Costs, work: Work) -> Prediction:
    """The round of a rank that exchanges `numel` parameters, in the code that `wire="auto"` settles on."""
    each = {name: _in_code(method, name, numel, sites, costs, work) for name in work.codecs}
    least = min(each.values(), key=lambda one: one.sent_bytes)
    quickest = min(each.values(), key=lambda one: one.total)
    return quickest if quickest.total * SWITCH_RATIO < least.total else least


def _in_code(method: Method, wire: str, numel: int, sites: int, costs: Costs, work: Work) -> Prediction:
    entries, payload, sums = method.density, method.payload, method.sums_of(sites)
    of_sums = min(entries * sums / payload, 1.0)
    if wire == FAST.name:
        payload, sums = (FAST.most_bytes(round(share * numel), numel) / numel for share in (entries, of_sums))
    announced = Announcement(
        site=0,
        round=1,
        numel=numel,
        entries=round(entries * numel),
        payload_bytes=round(payload * numel),
        sums_bits=fp32_bits(sums * numel),
    )
    by_exchange = predicted_bytes([announced] * sites)
    exchange = "dense" if method.is_dense else min(by_exchange, key=lambda name: by_exchange[name])
    if exchange == "dense":
        wire = "float32"
    sent = by_exchange[exchange]
    is_gathered, part = exchange == "gather", 1 / sites
    width = numel if is_gathered else slices_of(numel, sites)[0].stop
    frames = Frames.of(width).count
    # Of a single frame the sums leave once all entries have come: two transfers, one after the other.
    bursts = 2 if frames == 1 and not is_gathered else 1
    link = bursts * costs.sending(sent / bursts)
    one = work.codecs[wire] if wire in work.codecs else next(iter(work.codecs.values()))
    others = sites - 1
    if is_gathered:
        code = one.seal + others * one.open
    else:  # a slice of each site's entries, and the sums, which are so many times as many entries
        more = of_sums / entries
        code = others * part * (one.seal + one.open) + one.add
        code += more * part * (one.seal + others * one.open)
    code *= numel

    waits = 2 * costs.one_way + costs.store  # announcements and votes, and the verdict
    if not is_gathered and bursts == 1:
        waits += costs.one_way  # the first sums follow the first entries
    # At most AHEAD frames fly at once: where they are short, the link waits for them.
    waits += max(0, frames - AHEAD) * max(0.0, (costs.one_way - (link / frames)) / AHEAD)
    return Prediction(
        method=method.name,
        wire=wire,
        exchange=exchange,
        sent_bytes=sent,
        seconds={
            "encode": work.encode * numel,
            "link": link,
            "code": max(0.0, code - link) + min(code, link) / frames,
            "waits": waits,
            "apply": work.apply * numel,
        },
    )
