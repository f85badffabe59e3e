"""What one round takes, in seconds and bytes, and the report of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..members.view import View
from ..report import SiteTotals, dense_bytes
from ..wire.records import Vote


class Meter:
    """
    Args:
        view: over whose links the round runs.

    Attributes:
        votes_of_site: the last ones of all its ranks, once they have come.
        in_flight: seconds that an overlapped round travelled beside the inner steps.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._before = view.bytes_so_far
        self._elsewhere = 0  # bytes sent inside the site that the links of the view do not tell
        self._began = {"encode": time.perf_counter()}  # by what began
        self._all_had_come = self._ended = 0.0
        self._vote: Vote | None = None  # the last one of this rank
        self.votes_of_site: Sequence[Vote] = ()
        self.in_flight = 0.0
        self._stood_still = 0.0
        self._after: tuple[int, int, int] | None = None

    def begin(self, phase: str) -> None:
        self._began[phase] = time.perf_counter()

    def all_have_come(self) -> None:
        """All sites have come to the round."""
        self._all_had_come = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def travelled(self, in_flight: float, stood_still: float) -> None:
        """The round travelled beside the inner steps, which stood still for the second of these times."""
        self.in_flight, self._stood_still = in_flight, stood_still
        self._after = self._view.bytes_so_far  # what is sent from now on is the next round's

    def _sent(self) -> int:
        """Bytes to the other sites, so far."""
        return self._so_far[0] - self._before[0]

    @property
    def _so_far(self) -> tuple[int, int, int]:
        return self._after or self._view.bytes_so_far

    def last_vote(self, vote: Vote, *, numel: int, entries: int) -> Vote:
        """This rank's, by which the other ranks of its site learn what it has sent."""
        self._vote = replace(vote, numel=numel, entries=entries, sent_bytes=self._sent())
        return self._vote

    def shared(self, view: View, count: int) -> None:
        """So many bytes inside the site, after the round, over the links of this view."""
        if view is not self._view or self._after is not None:
            self._elsewhere += count

    def seconds(self) -> Mapping[str, float]:
        ends = [*list(self._began.values())[1:], self._ended]
        took = {what: end - began for (what, began), end in zip(self._began.items(), ends, strict=True)}
        return took | {"exchange": self._stood_still} if self.in_flight else took

    def waited(self) -> float:
        if self.in_flight:
            return self._stood_still
        return self._all_had_come - self._began["exchange"]

    def bytes(self) -> dict[str, int]:
        """Of a report."""
        sent, received, inside = (
            after - before for after, before in zip(self._so_far, self._before, strict=True)
        )
        return {"sent_bytes": sent, "received_bytes": received, "site_bytes": inside + self._elsewhere}

    def site(self) -> SiteTotals:
        mine = self._vote
        assert mine is not None
        # Links may have broken before the votes of this site's other ranks had come: each counts as this one.
        votes = self.votes_of_site or [mine] * self._view.inside.size
        last_vote = self._sent() - mine.sent_bytes  # as many bytes for each rank
        numel = sum(vote.numel for vote in votes)
        return SiteTotals(
            numel=numel,
            entries=sum(vote.entries for vote in votes),
            sent_bytes=sum(vote.sent_bytes + last_vote for vote in votes),
            dense_bytes=dense_bytes(numel, self._view.num_sites),
        )
