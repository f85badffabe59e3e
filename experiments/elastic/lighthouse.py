"""torchft's lighthouse, which says to sites that come and go who is there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.processes.orphans import through

HEARTBEAT_MS = 2000  # without a heartbeat for so long, a site counts as gone


@contextmanager
def lighthouse(log: Path, *, host: str = "127.0.0.1") -> Iterator[str]:
    """Its address. It outlives neither this context nor this process, however it ends.

    Raises:
        ExperimentError: torchft is not installed, or its lighthouse does not start.
    """
    command = shutil.which("torchft_lighthouse", path=sysconfig.get_path("scripts"))
    if find_spec("torchft") is None or command is None:
        raise ExperimentError("sites that come and go need torchft: pip install torchft")
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = int(probe.getsockname()[1])
    limits = ["--min_replicas", "1", "--join_timeout_ms", "600000"]
    limits += ["--heartbeat_timeout_ms", str(HEARTBEAT_MS)]
    with log.open("a", encoding="utf-8") as said:
        process = subprocess.Popen(
            through([command, "--bind", f"{host}:{port}", *limits]),
            stdout=said,
            stderr=said,
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
    try:
        _wait_for(host, port)
        yield f"http://{host}:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ExperimentError(f"the lighthouse does not listen on {host}:{port} ({error})") from error
            time.sleep(0.1)
