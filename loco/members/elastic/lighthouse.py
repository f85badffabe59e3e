"""The quorum: which sites are there now, by torchft's lighthouse.

Of torchft only the lighthouse and its client are used: a site says that it lives, several times a second, and
asks before each round who takes part in it. The answer comes once all that live have asked.
"""

import json
import logging
import os
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from ...coordination.authentication import StoreSeals
from ...coordination.store_client import address_towards
from ...coordination.ticker import Ticker
from ...errors import AuthenticationError, TransportError, first_line
from .quorum import Claim, Member

BEAT = 0.25  # seconds; the lighthouse's own limit is 5 by default
HOW_TO_START = "start one with `torchft_lighthouse --min_replicas 1 --join_timeout_ms 600000`"
_SLICE = 5.0  # seconds of one request: Ctrl-C is noticed between two of them
_REMIND = 60.0  # seconds between two warnings
_logger = logging.getLogger(__name__)


class Lighthouse:
    """A site's connection to the lighthouse.

    Args:
        address: where it listens, e.g. "http://10.0.0.1:29510".
        id: this process's, and nobody else's.
        name: the site's.
        store: where the others reach the store that this site hosts.
        timeout: seconds to connect to it.
        key: of the run, if it has one: who lacks it is left out.

    Raises:
        ImportError: torchft is not installed.
        TransportError: no lighthouse answers there.
    """

    def __init__(
        self, address: str, *, id: str, name: str, store: str, timeout: float, key: bytes | None = None
    ) -> None:
        self.address = address
        self.id = id
        self._name = name
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._store = store
        self._timeout = timeout
        self._seals = StoreSeals(key)
        self._client = _client(address, timeout)
        self._ticker: Ticker | None = None

    def ask(self, claim: Claim) -> tuple[str, list[Member]]:
        """A quorum's name and its members, this site among them.

        It waits for the sites that live and train. It also waits for a lighthouse that does not answer, which
        may be started again; the heartbeats, a request each, tell the two apart, and log it.

        Raises:
            AuthenticationError: at the start: another site has another key.
            TransportError: another run's sites ask the same lighthouse.
        """
        if self._ticker is None:  # a site that waits for nobody must not be waited for
            beats = _Beats(_client(self.address, self._timeout), self.address, self.id)
            self._ticker = Ticker(
                self, beats.beat, every=BEAT, name="loco lighthouse heartbeat", patience=3.0
            )
        said = {"name": self._name, "where": self._where, "store": self._store, "claim": claim.to_json()}
        data = {"said": self._seals.write(self.id, json.dumps(said))}
        while True:
            try:
                quorum = self._client.quorum(
                    self.id,
                    timedelta(seconds=_SLICE),
                    address=self._name,
                    store_address=self._store,
                    step=claim.round,
                    world_size=1,
                    shrink_only=False,
                    data=data,
                )
                break
            except TimeoutError:  # the others train, or the lighthouse is stopped
                pass
            except RuntimeError:  # it may be starting again
                time.sleep(BEAT)
        # A lighthouse that was started again counts from the beginning, so the number alone is no name.
        name = f"{quorum.quorum_id}.{quorum.created.seconds}.{quorum.created.nanos:09d}"
        members: list[Member] = []
        for one in quorum.participants:
            try:
                members.append(self._member(one.replica_id, one.data))
            except AuthenticationError as error:
                text = f"{one.replica_id} asks the same lighthouse with another key, or none"
                if not claim.belongs:  # the wrong one may be this site's: it must not train alone
                    raise AuthenticationError(text) from error
                _logger.warning("%s, and is left out", text)
        return name, members

    def _member(self, id: str, data: Any) -> Member:
        try:
            said = json.loads(self._seals.read(id, str(dict(data or {})["said"])))
            claim = Claim(**said.pop("claim"))
            return Member(id=id, claim=claim, **said)
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(
                f"{id} asks the same lighthouse and is no site of this run ({error}): "
                f"a run needs a lighthouse and a key of its own",
                has_remedy=True,
            ) from error

    def close(self) -> None:
        """Say nothing any more: the lighthouse forgets this site within its time limit."""
        if self._ticker is not None:
            self._ticker.close()


class _Beats:
    """What the thread works on: it must not hold the Lighthouse.

    Args:
        client: of its own, since the other one waits for quorums.
    """

    def __init__(self, client: Any, address: str, id: str) -> None:
        self._client = client
        self._address = address
        self._id = id
        self._lost_since: float | None = None
        self._told = 0.0  # when it was last logged

    def beat(self) -> None:
        try:
            self._client.heartbeat(self._id, timedelta(seconds=1))
        except (RuntimeError, TimeoutError) as error:
            now = time.monotonic()
            if self._lost_since is None or now - self._told >= _REMIND:
                self._lost_since, self._told = self._lost_since or now, now
                _logger.warning(
                    "the lighthouse at %s has not answered for %.0f s, and rounds wait for it (%s)",
                    self._address,
                    now - self._lost_since,
                    first_line(error),
                )
        else:
            if self._lost_since is not None:
                _logger.warning("the lighthouse at %s answers again", self._address)
            self._lost_since = None


def _client(address: str, timeout: float) -> Any:
    try:
        from torchft.coordination import LighthouseClient  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"a lighthouse needs torchft, loco's extra `elastic` ({error}): pip install 'torchft>=0.2'"
        ) from error
    try:
        return LighthouseClient(address, timedelta(seconds=timeout))
    except (RuntimeError, TimeoutError, ValueError) as error:
        text = f"no lighthouse answers at {address} ({error}): {HOW_TO_START}"
        raise TransportError(text, has_remedy=True) from error


def address_towards_lighthouse(lighthouse: str) -> str:
    """This machine's address on the way there. An unreachable lighthouse is reported later."""
    url = urlsplit(lighthouse)
    try:
        return address_towards(url.hostname or "", url.port or 80, 5.0)
    except (RuntimeError, ValueError):
        return socket.gethostname()


def is_local(host: str) -> bool:
    """Whether it is an address of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
