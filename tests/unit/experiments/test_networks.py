"""Sites as processes in networks of their own leave no process and no network behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import gone, python_path
from selection import COMMANDS, INTERRUPTIONS

from experiments.processes.namespaces import Network, why_not
from experiments.processes.sites import Sites

needs_networks = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class Idle:
    def __init__(self, site: int) -> None:
        self.site = site

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        if self.site == 1:
            raise ValueError("on purpose")
        time.sleep(60)


def hub_of(sites: Sites) -> "subprocess.Popen[bytes]":
    assert sites.network is not None
    return sites.network._hub


PROGRAM = """
import time
from experiments.processes.namespaces import Network
from experiments.processes.sites import Sites
from test_networks import Idle, hub_of

if __name__ == "__main__":
    with Sites(2, Idle, network=Network()) as sites:
        print(*sites.call("pid"), hub_of(sites).pid, flush=True)
        time.sleep(60)
"""


@pytest.mark.check(COMMANDS)
@pytest.mark.root
@needs_networks
def test_nothing_is_left_after_a_run() -> None:
    with Sites(2, Idle, network=Network()) as sites:
        pids = [*sites.call("pid"), hub_of(sites).pid]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert gone(pids)


@pytest.mark.check(COMMANDS)
@pytest.mark.root
@needs_networks
def test_nothing_is_left_after_an_error() -> None:
    pids: list[int] = []

    def fail() -> None:
        with Sites(2, Idle, network=Network()) as sites:
            pids.extend([*sites.call("pid"), hub_of(sites).pid])
            sites.call("fail")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert len(pids) == 3
    assert gone(pids)


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.root
@needs_networks
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(how: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        # As a terminal does: to the whole group of processes. The others only to the one.
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        process.wait(timeout=60)
    assert gone(pids)
