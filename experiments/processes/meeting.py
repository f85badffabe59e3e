"""The store at which sites meet, as a process of its own: none of them is special then."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.processes.orphans import through


@contextmanager
def meeting(log: Path, *, host: str = "127.0.0.1") -> Iterator[str]:
    """Its address, host:port. It outlives neither this context nor this process, however it ends.

    Raises:
        ExperimentError: it does not start.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = int(probe.getsockname()[1])
    command = through([sys.executable, "-m", "loco", "meet", f"{host}:{port}"])
    with log.open("a", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        _wait_for(host, port)
        yield f"{host}:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ExperimentError(f"no store listens at {host}:{port} ({error})") from error
            time.sleep(0.1)
