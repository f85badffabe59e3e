"""The ranks of a site speak to other sites with one voice: the first one's."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...coordination.heartbeats import guarded
from ...coordination.store_client import no_store
from ...errors import AgreementError, LocoError, TransportError
from ...logs import Waiting
from ...net.transport import listed
from ..fixed import FixedSites
from ..view import View

_POLL = 0.05  # seconds
_logger = logging.getLogger(__name__)
_PHASE = "waiting for this site's first rank, which asks who takes part"


class FirstRank:
    """What the first rank of a site finds out, all its ranks are told, however long it takes.

    Args:
        own: this site's world.
    """

    def __init__(self, own: FixedSites) -> None:
        self._own = own
        self._over = ""  # the name of the view over which all count alike
        self._asked = 0

    def find_out(self, view: View, ask: Callable[[], Any]) -> Any:
        """What `ask` returns on the first rank, JSON-able; it is called there alone.

        Args:
            view: over which all ranks of this site have talked since the last call.

        Raises:
            LocoError: on all ranks: `ask` raised it.
            TransportError: the first rank is lost.
        """
        if view.name != self._over:
            self._over, self._asked = view.name, 0
        self._asked += 1
        key = f"loco/{view.name}/found out/{self._asked}"
        if self._own.rank_in_site > 0:
            return _read(self._await(key, view.inside.link))
        outcome: dict[str, Any] = {"why": "it was interrupted", "lasting": True}
        try:
            found = ask()
            outcome = {"found": found}
            return found
        except LocoError as error:
            lasting = not isinstance(error, TransportError) or error.lasting
            outcome = {"why": str(error), "lasting": lasting, "lost": isinstance(error, TransportError)}
            raise
        finally:
            self._tell(key, json.dumps(outcome))

    def _tell(self, key: str, outcome: str) -> None:
        try:
            self._own.store.set(key, self._own.store_seals.write(key, outcome))
        except RuntimeError as error:
            phase = "telling this site's ranks who takes part"
            raise no_store(phase, self._own.store, error) from error
        before = f"{key.rpartition('/')[0]}/{self._asked - 1}"
        with suppress(RuntimeError):  # a slow store may keep it
            self._own.store.delete_key(before)  # all have read it, since they have talked

    def _await(self, key: str, link: str) -> str:
        store = self._own.store
        watched = guarded(
            self._own.liveness, [0], phase=_PHASE, named=lambda ranks: listed("rank", ranks), link=link
        )
        with watched as guard, Waiting(_logger, lambda: "this site's first rank, which asks who takes part"):
            while True:
                try:
                    if store.check([key]):
                        return self._own.store_seals.read(key, store.get(key).decode())
                except RuntimeError as error:
                    raise no_store(_PHASE, store, error) from error
                guard.check()
                time.sleep(_POLL)


def _read(outcome: str) -> Any:
    told = json.loads(outcome)
    if "found" in told:
        return told["found"]
    text = f"this site's first rank: {told['why']}"
    raise TransportError(text, lasting=told["lasting"]) if told.get("lost") else AgreementError(text)
