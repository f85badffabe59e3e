"""A lighthouse that is stopped, or killed and started again: the sites say so, wait, and go on."""

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

import pytest
import torch
from selection import FLEETS
from states import small_model

import loco

pytestmark = [pytest.mark.check(FLEETS)]
PATIENCE = 60.0  # seconds; no test is about time


class Beacon:
    """torchft's lighthouse as a process of its own, which always listens at the same address."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        program = Path(sys.executable).with_name("torchft_lighthouse")
        self.process = subprocess.Popen(
            [
                program,
                "--bind",
                f"127.0.0.1:{self.port}",
                "--min_replicas",
                "1",
                "--join_timeout_ms",
                "60000",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
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
def beacon() -> Iterator[Beacon]:
    beacon = Beacon()
    yield beacon
    beacon.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_rounds_wait_for_a_lighthouse_that_is_gone_and_say_so(
    how: str, beacon: Beacon, caplog: pytest.LogCaptureFixture
) -> None:
    def said(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    topology = loco.Sites(1, site="a", lighthouse=beacon.address)
    optimizer = loco.DiLoCo(torch.optim.SGD(small_model(0).parameters(), lr=0.1), topology=topology)
    optimizer.sync()
    with caplog.at_level(logging.WARNING, "loco"), ThreadPoolExecutor(1) as pool:
        if how == "stopped":
            beacon.stop()
        else:
            beacon.kill()
        round = pool.submit(optimizer.sync)
        until(lambda: said(f"the lighthouse at {beacon.address} has not answered for"))
        assert not round.done()
        if how == "stopped":
            beacon.process.send_signal(signal.SIGCONT)
        else:
            beacon.start()
        assert round.result(PATIENCE).round == 2
        until(lambda: said("answers again"))
    topology.close()


def test_a_site_begins_anew_in_the_same_process(beacon: Beacon) -> None:
    """As after an exception that still holds the optimizer of before: two sites of one name are not one."""

    def begin() -> loco.DiLoCo:
        topology = loco.Sites(1, site="a", lighthouse=beacon.address)
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
