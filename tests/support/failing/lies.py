"""What a site says that no honest one would: each is done by its process until a patch is undone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loco.net.transport import Transport
from loco.round import round as one_round
from loco.round.round import Round
from loco.wire.framing import Frame, Framing
from loco.wire.records import Announcement, FrameHeader, Kind, Vote

Lie = Callable[[pytest.MonkeyPatch], None]


def announcing(forge: Callable[[Announcement], Announcement]) -> Lie:
    """In a header that is whole."""
    announce = one_round.announce

    def lie(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(one_round, "announce", lambda view, mine, *frame: announce(view, forge(mine), *frame))

    return lie


def framing(forge: Callable[[FrameHeader], FrameHeader]) -> Lie:
    """In the header of every frame."""
    seal = Framing.seal

    def forged(self: Framing, *args: Any) -> Frame:
        frame = seal(self, *args)
        return frame._replace(header=forge(frame.header), whole=None)

    return lambda patch: patch.setattr(Framing, "seal", forged)


def fails_and_votes_for_it(patch: pytest.MonkeyPatch) -> None:
    """Its frames say that it could not make them, and it votes for the round nevertheless."""
    patch.setattr(Framing, "seal", lambda self, _, *which: self.failed(*which))


def refuses_for_no_reason(mine: Announcement) -> Any:
    """It votes for the round in the place of an announcement."""
    return Vote(site=mine.site, round=mine.round)


def is_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """In the place of its vote there is that of another round."""
    records = Transport.swap_records

    def stray(self: Transport, record: bytes, *, phase: str, **limit: Any) -> list[bytes]:
        if self.size > 1 and ", vote" in phase:
            vote = Vote.unpack(record)
            record = replace(vote, round=vote.round + 1).pack()
        return records(self, record, phase=phase, **limit)

    patch.setattr(Transport, "swap_records", stray)


def exchanges_otherwise(patch: pytest.MonkeyPatch) -> None:
    """It gathers where the others owner-reduce or send all, or the other way round."""
    choose = Round._chosen_exchange
    other = {"gather": "owner", "owner": "gather", "dense": "gather"}
    patch.setattr(Round, "_chosen_exchange", lambda self, own: other[choose(self, own)])


ANNOUNCEMENTS: dict[str, Lie] = {
    "announces another size": announcing(lambda mine: replace(mine, numel=mine.numel + 1)),
    "announces sums": announcing(lambda mine: replace(mine, kind=Kind.SUMS)),
    "announces too many entries": announcing(lambda mine: replace(mine, entries=1 << 40)),
    "announces as another site": announcing(lambda mine: replace(mine, site=mine.site ^ 1)),
    "announces nothing": announcing(refuses_for_no_reason),
}
FRAMES: dict[str, Lie] = {
    "sends frames of another round": framing(lambda mine: replace(mine, round=mine.round + 6)),
    "sends frames of another anchor": framing(lambda mine: replace(mine, digest=mine.digest ^ 5)),
    "sends frames without end": framing(lambda mine: replace(mine, body_bytes=1 << 40)),
    "sends frames in no code": framing(lambda mine: replace(mine, codec=77)),
}
LIES: dict[str, Lie] = {
    **ANNOUNCEMENTS,
    **FRAMES,
    "fails and votes for it": fails_and_votes_for_it,
    "is elsewhere": is_elsewhere,
    "exchanges otherwise": exchanges_otherwise,
}
