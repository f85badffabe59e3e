"""Sites that come and go: a test starts them, orders what they do, and hears what they tell."""

import json
import os
import pickle
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from fleet_site import Told, World, serve
from sites import context
from states import Snapshot, assert_same
from torch._C._distributed_c10d import TCPStore

PATIENCE = 90.0  # seconds; no test is about time
HEARTBEAT = 1500
KEY = bytes(range(16))


def lighthouse(liveness: int) -> tuple[Any, str]:
    """A server, and host:port of it.

    liveness: as a `Fleet`'s.
    """
    needed = "needs torchft: pip install '.[elastic]'"
    coordination = pytest.importorskip("torchft.coordination", reason=needed)
    server = coordination.LighthouseServer(
        "127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=liveness
    )
    # It calls itself by the host's name, at which it may not listen.
    return server, f"127.0.0.1:{server.address().rpartition(':')[2]}"


class Fleet:
    """A store or a lighthouse in this process, and the sites that were started. Use it in a `with`.

    by: where the sites meet, "store" or "lighthouse".
    key: of the run.
    ranks: of each site. What several ranks tell is put together, and checked to agree.
    shards: FSDP2 divides the parameters among the ranks of a site.
    liveness: milliseconds without a sign of life after which the lighthouse counts a site as dead. Every
        death costs a test so long; where none dies, it may as well be more than any machine is ever busy.
    """

    def __init__(
        self,
        sites: int,
        *,
        by: str = "store",
        key: bytes | None = KEY,
        ranks: int = 1,
        shards: bool = False,
        liveness: int = HEARTBEAT,
    ) -> None:
        self.sites, self.ranks, self.shards = sites, ranks, shards
        self._folder = tempfile.TemporaryDirectory()
        self._meeting: Any
        self._meet: dict[str, Any]
        if by == "lighthouse":
            self._meeting, where = lighthouse(liveness)
            self._meet = {"lighthouse": f"http://{where}"}
        else:
            self._meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._meet = {"at": f"127.0.0.1:{self._meeting.port}"}
        self._key = key
        self._running: dict[str, tuple[Any, Connection]] = {}  # by rank, "s1/0"
        self._started = 0

    def start(self, *names: str, ranks: int | None = None, **options: Any) -> None:
        """A process for each name; it then waits for the run's θ. `options` are PulseLoCo's, or a `key`.

        "s1 again" is one more process of site s1.
        """
        for name in names:
            self._started += 1
            key = options.pop("key", self._key)
            world = ranks or self.ranks
            for rank in self._ranks_of(name):
                del self._running[rank]
            for rank in range(world):
                ours, theirs = context.Pipe()
                own = World(rank, world, f"{self._folder.name}/{self._started}", self.shards)
                process = context.Process(
                    target=serve,
                    args=(name.split()[0], own, self._meet, self.sites, key, theirs, options),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._running[f"{name}/{rank}"] = process, ours

    def _ranks_of(self, name: str) -> list[str]:
        """Of "s1" all, of "s1/0" one."""
        return [key for key in self._running if name in (key, key.rpartition("/")[0])]

    def order(self, name: str, *command: Any) -> None:
        for key in self._ranks_of(name):
            self._running[key][1].send(command)

    def hear(self, name: str) -> Told:
        """What a site tells next; what it raised is raised here."""
        return put_together([self._heard(key) for key in self._ranks_of(name)], shards=self.shards)

    def _heard(self, name: str) -> Told:
        end = self._running[name][1]
        if not end.poll(PATIENCE):
            raise TimeoutError(f"{name} told nothing within {PATIENCE:g} s")
        try:
            told = pickle.loads(end.recv_bytes())
        except EOFError:
            raise RuntimeError(f"{name} died without a word") from None
        if isinstance(told, str):
            raise RuntimeError(f"{name} failed:\n{told}")
        return told

    def round(self, *names: str) -> dict[str, Told]:
        """Two inner steps and a round on each of these sites."""
        return self._all(names, "round", 2)

    def boundary(self, *names: str) -> dict[str, Told]:
        """Where rounds overlap: two inner steps and a boundary on each of these sites."""
        return self._all(names, "boundary", 2)

    def _all(self, names: Iterable[str], *command: Any) -> dict[str, Told]:
        for name in names:
            self.order(name, *command)
        return told_by(self, names)

    def rounds_until_joined(self, new: str, *names: str) -> list[dict[str, Told]]:
        """Rounds of the others until a site that comes has been given θ, or turned away."""
        rounds = [self.round(*names)]
        while new not in rounds[-1][names[0]].came:
            rounds.append(self.round(*names))
        return rounds

    def has_told(self, name: str, within: float = 0.1) -> bool:
        return all(self._running[key][1].poll(within) for key in self._ranks_of(name))

    def wait_for_requests(self, count: int) -> None:
        """Until so many processes have asked for the next quorum."""
        deadline = time.monotonic() + PATIENCE
        while self._requests() < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _requests(self) -> int:
        if "at" in self._meet:
            listing = self._meeting.get("sites/roll").decode().rpartition(" ")[0]
            return len(json.loads(listing)["waiting"])
        with urllib.request.urlopen(f"{self._meet['lighthouse']}/status") as answer:
            asked = re.search(r"(\d+)/\d+ participants", answer.read().decode())
        return 0 if asked is None else int(asked[1])

    def send(self, name: str, signum: signal.Signals) -> None:
        for key in self._ranks_of(name):
            os.kill(self._running[key][0].pid, signum)

    def wait_for_death(self, name: str) -> None:
        for key in self._ranks_of(name):
            process, _ = self._running[key]
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL

    def kill(self, name: str) -> None:
        self.send(name, signal.SIGKILL)
        self.wait_for_death(name)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._running.values():
            process.kill()
            process.join()
        if "lighthouse" in self._meet:
            self._meeting.shutdown()
        self._folder.cleanup()


def put_together(ranks: list[Told], *, shards: bool) -> Told:
    """What the ranks of a site tell, each of its part, as if the site had one."""
    if len(ranks) == 1:
        return ranks[0]
    first = ranks[0]
    for told in ranks:
        assert (told.round, told.sites, told.came) == (first.round, first.sites, first.came)
        for state in told.gave_up:
            assert_same(state, told.before)
    before = _whole([told.before for told in ranks], shards=shards)
    return replace(
        first,
        before=before,
        after=_whole([told.after for told in ranks], shards=shards),
        gave_up=[before] if any(told.gave_up for told in ranks) else [],
        error="\n".join(told.error for told in ranks if told.error),
        extra=[told.extra for told in ranks]
        if any(told.extra != first.extra for told in ranks)
        else first.extra,
        warned="\n".join(told.warned for told in ranks if told.warned),
    )


def _whole(parts: list[Snapshot], *, shards: bool) -> Snapshot:
    """θ, m and e of all ranks, and w, which each has whole if it is not divided."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if parts[0] and not shards:
        whole["weights"] = parts[0]["weights"]
        for part in parts:
            np.testing.assert_array_equal(part["weights"], whole["weights"])
    return whole


def told_by(fleet: Fleet, names: Iterable[str]) -> dict[str, Told]:
    return {name: fleet.hear(name) for name in names}
