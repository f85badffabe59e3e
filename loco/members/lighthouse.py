"""The quorum: which sites are there now, by torchft's lighthouse.

Of torchft only the lighthouse and its client are used: a site says that it lives, several times a second, and
asks before each round who takes part in it. The answer comes once all that live have asked.
"""

import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

from ..errors import TransportError
from .quorum import Claim, Member

BEAT = 0.25  # seconds; the lighthouse's own limit is 5 by default
HOW_TO_START = "start one with `torchft_lighthouse --min_replicas 1 --join_timeout_ms 600000`"
_SLICE = 5.0  # seconds of one request: Ctrl-C is noticed between two of them
_logger = logging.getLogger(__name__)


class Lighthouse:
    """A site's line to the lighthouse.

    Args:
        address: where it listens, e.g. "http://10.0.0.1:29510".
        id: this process's, and nobody else's.
        name: the site's.
        store: where the others reach the store that this site hosts.
        timeout: seconds without an answer from the lighthouse after which it counts as gone.

    Raises:
        ImportError: torchft is not installed.
        TransportError: no lighthouse answers there.
    """

    def __init__(self, address: str, *, id: str, name: str, store: str, timeout: float) -> None:
        self.address = address
        self.id = id
        self._name = name
        self._store = store
        self._timeout = timeout
        self._client = _client(address, timeout)
        self._end: Any = None

    def ask(self, claim: Claim) -> tuple[str, list[Member]]:
        """A quorum's name and its members, this site among them. Waits for the sites that live and train.

        Raises:
            TransportError: the lighthouse is gone.
        """
        if self._end is None:  # who waits for nobody must not be waited for
            self._begin_to_beat()
        data = {"name": self._name, **claim.to_json()}
        heard = time.monotonic()
        while True:
            began = time.monotonic()
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
            except TimeoutError:  # the others train
                heard = time.monotonic()
            except RuntimeError as error:
                if began - heard > self._timeout:
                    raise TransportError(
                        f"the lighthouse at {self.address} has not answered for {self._timeout:g} s ({error})"
                    ) from error
                time.sleep(BEAT)
        # A lighthouse that was started again counts from the beginning, so the number alone is no name.
        name = f"{quorum.quorum_id}.{quorum.created.seconds}.{quorum.created.nanos:09d}"
        return name, [_member(one) for one in quorum.participants]

    def close(self) -> None:
        """Say nothing any more: the lighthouse forgets this site within its time limit."""
        if self._end is not None:
            self._end()

    def _begin_to_beat(self) -> None:
        ended = threading.Event()
        line = _client(self.address, self._timeout)  # a thread of its own has a line of its own
        thread = threading.Thread(
            target=_beat_on, args=(line, self.id, ended), name="loco's signs of life", daemon=True
        )
        thread.start()
        # Also at the interpreter's exit, which must not find the thread inside torchft.
        self._end = weakref.finalize(self, _stop, ended, thread)


def _client(address: str, timeout: float) -> Any:
    try:
        from torchft.coordination import LighthouseClient  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"sites that come and go need torchft, loco's extra `elastic` ({error}): "
            f"pip install 'torchft>=0.2'"
        ) from error
    try:
        return LighthouseClient(address, timedelta(seconds=timeout))
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise TransportError(f"no lighthouse answers at {address} ({error}): {HOW_TO_START}") from error


def _member(participant: Any) -> Member:
    data = dict(participant.data or {})
    name = data.pop("name", participant.replica_id)
    try:
        claim = Claim(**data)
    except TypeError as error:
        raise TransportError(
            f"{participant.replica_id} asks the same lighthouse and is no site of this run ({error}): "
            f"a run needs a lighthouse of its own"
        ) from error
    return Member(id=participant.replica_id, name=str(name), store=participant.store_address, claim=claim)


def _beat_on(client: Any, id: str, ended: threading.Event) -> None:
    lost = False
    while not ended.is_set():
        try:
            client.liveness(id, timedelta(seconds=1))
            lost = False
        except (RuntimeError, TimeoutError) as error:  # it may be starting again
            if not lost:
                _logger.warning("the lighthouse does not answer: %s", error)
            lost = True
        ended.wait(BEAT)


def _stop(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join(3.0)
