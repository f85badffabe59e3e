"""The ranks of a site that have lost their links, and have new ones, are brought to one state."""

import hashlib

from ...members.view import View
from ..hooks import Phase
from ..inside_site import share_anchor
from ..outer.outer_state import OuterState
from ..round import Round

_NAME = 8  # bytes
_NONE = bytes(_NAME)


def catch_up_in_site(state: OuterState, view: View, pending: Round | None, committed: str | None) -> None:
    """
    1. Where sites come and go, the last vote, and then the store of the links, may have been lost to some
       ranks of this site and not to others. Whoever has committed the round tells those in doubt, who commit
       it too. If another rank is not in doubt and has not committed it, no rank has.
    2. Of a round that counts, the lost link may have kept some ranks of this site from the others' parts of
       θ; all send theirs again, since those that had everything don't know. Where rounds overlap, who was in
       doubt applies the round at its next boundary, and none has its part before.

    Args:
        view: the new links.
        pending: the round of this rank that has no end yet.
        committed: the name of the view of its last round, "" if it made none. None: doubts are for the
            register to clear up.
    """
    in_doubt = committed is not None and pending is not None and pending.is_promised
    overlaps = state.settings.overlap is not None
    lacks = state.lacks_slices or (not overlaps and pending is not None and pending.phase is Phase.COMMITTED)
    doubt = _digest(pending.view.name) if pending is not None and in_doubt else _NONE
    told = view.inside.swap_records(
        bytes([lacks]) + doubt + _digest(committed or ""), phase="reconnecting inside the site"
    )
    doubts, counted = [record[1 : 1 + _NAME] for record in told], {record[1 + _NAME :] for record in told}
    if pending is not None and in_doubt and (doubt in counted or set(doubts) != {doubt}):
        pending.learn_verdict(committed=doubt in counted)
        if doubt in counted and not overlaps:
            pending.apply()
            lacks = True
    were_told = bool(counted & (set(doubts) - {_NONE}))
    if (were_told and overlaps) or not (were_told or any(record[0] for record in told)):
        return
    if pending is not None and lacks:
        pending.share(view)
    else:
        share_anchor(state, view, write=lacks)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_NAME).digest() if name else _NONE
