"""A lighthouse or a store that is stopped, or killed and started again: the sites say so, wait, and go on."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import FLEETS
from states import small_model

import loco
from loco.members import meeting

pytestmark = [pytest.mark.check(FLEETS)]
PATIENCE = 60.0  # seconds; no test is about time


LIGHTHOUSE = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1", "--bind"]
STORE = [sys.executable, "-m", "loco", "meet"]


class Beacon:
    """A process of its own that says who is there, and always listens at the same address."""

    def __init__(self, by: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        where = f"127.0.0.1:{self.port}"
        self._command = [*(LIGHTHOUSE if by == "lighthouse" else STORE), where]
        self.told: dict[str, Any] = {"at": where, "at_least": 1}
        self.lost, self.found = f"s: the sites' store at {where}", ""
        if by == "lighthouse":
            self.told = {"lighthouse": f"http://{where}"}
            self.lost, self.found = f"the lighthouse at http://{where} has not answered for", "answers again"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.listens)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # its threads may run on for some milliseconds

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def beacon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beacon]:
    if request.param == "lighthouse":
        pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    monkeypatch.setattr(meeting, "host_at", lambda *_: None)  # another machine's address
    beacon = Beacon(request.param)
    yield beacon
    beacon.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("beacon", "how"),
    [("lighthouse", "stopped"), ("lighthouse", "killed"), ("store", "killed")],
    indirect=["beacon"],
)
def test_rounds_wait_for_who_says_who_is_there_and_say_so(
    how: str, beacon: Beacon, caplog: pytest.LogCaptureFixture
) -> None:
    def said(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    topology = loco.Sites(1, site="a", patience=PATIENCE, dead_after=2.0, **beacon.told)
    optimizer = loco.DiLoCo(torch.optim.SGD(small_model(0).parameters(), lr=0.1), topology=topology)
    optimizer.sync()
    with caplog.at_level(logging.WARNING, "loco"), ThreadPoolExecutor(1) as pool:
        if how == "stopped":
            beacon.stop()
        else:
            beacon.kill()
        round = pool.submit(optimizer.sync)
        until(lambda: said(beacon.lost))
        assert not round.done()
        if how == "stopped":
            beacon.process.send_signal(signal.SIGCONT)
        else:
            beacon.start()
        assert round.result(PATIENCE).round == 2
        if beacon.found:
            until(lambda: said(beacon.found))
    topology.close()


@pytest.mark.parametrize("beacon", ["lighthouse", "store"], indirect=True)
def test_a_site_begins_anew_in_the_same_process(beacon: Beacon) -> None:
    """As after an exception that still holds the optimizer of before: two sites of one name are not one."""

    def begin() -> loco.DiLoCo:
        topology = loco.Sites(1, site="a", **beacon.told)
        return loco.DiLoCo(torch.optim.SGD(small_model(0).parameters(), lr=0.1), topology=topology)

    first = begin()
    first.sync()
    second = begin()
    with pytest.raises(
        loco.TransportError, match="the sites of this optimizer are closed: site a began anew"
    ):
        first.sync()
    assert second.sync().round == 1
    second.topology.close()
