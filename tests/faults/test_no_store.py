"""Where the sites meet, something else listens, or nothing yet: it is said in a sentence, and soon."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from scripted import Scripted, parameters
from selection import COMMANDS
from sites import free_port, hear, run_ranks, tell
from test_repeats import kept_warnings
from torch._C._distributed_c10d import TCPStore

import loco
from loco import logs
from loco.coordination.store_client import RemoteStore, check_store
from loco.members import meeting

PROGRAM = """
import loco
try:
    loco.Sites(2, site="b", patience={patience})
except loco.LocoError as error:
    print(type(error).__name__, error)
"""


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Something that does `answer` to each connection -> its address, which is this machine's."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        ends: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    end, _ = listener.accept()
                except OSError:
                    return
                ends.append(end)
                threading.Thread(target=answer, args=(end,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            end.close()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def http(end: socket.socket) -> None:
    """A real server, which answers once it has read a line."""
    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        server.finish_request(end, end.getpeername())
    end.close()


ANSWERS: dict[str, Callable[[socket.socket], object]] = {
    "HTTP": http,
    "SSH": lambda end: end.sendall(b"SSH-2.0-OpenSSH_9.9p1\r\n"),
    "silent": lambda end: None,
    "closing": lambda end: end.close(),
}


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize("what", list(ANSWERS))
def test_another_program_at_the_sites_address_is_told_of_within_seconds(what: str) -> None:
    """By a warning, where a slow store or a tunnel may do the same; and torch says nothing of its own."""
    with listening(ANSWERS[what]) as at:
        sure = what in ("HTTP", "SSH")
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(patience=600.0 if sure else 6.0)],
            env=os.environ | {"LOCO_AT": at, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    if sure:
        assert ended.stdout.startswith(
            f"TransportError what listens at {at} is no store of loco's: it says b'"
        )
        assert "Is another program using the port? Choose another one (LOCO_AT)" in ended.stdout
        assert ended.stderr == ""
        return
    (said,) = ended.stderr.splitlines()
    assert said.startswith(f"still waiting after 4 s: the sites' store at {at} (LOCO_AT)")
    assert said.endswith("If another program uses it, choose another one")
    # A connection that is closed while something is still to be read is reset.
    hows = ("does not answer a store's ping", "closes the connection and does not answer")
    assert any(
        f"TransportError what listens at {at} {how}" in ended.stdout
        for how in hows[: 2 if what == "closing" else 1]
    )
    told = r"for (5\.\d+|6) s: the site whose machine has this address hosts the store"
    assert re.search(told, ended.stdout), ended.stdout


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_stores_are_known(use_libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    check_store("127.0.0.1", store.port, 20.0)


def test_a_slow_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that looks up the name of who connects answers after seconds: here, once it was told of."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = threading.Event()

    def pass_on(end: socket.socket) -> None:
        told.wait(60.0)
        with socket.create_connection(("127.0.0.1", store.port)) as real:
            real.sendall(end.recv(1 << 16))
            end.sendall(real.recv(1 << 16))

    monkeypatch.setattr(meeting, "SAY_SOON", 0.1)
    monkeypatch.setattr(logs, "warn_once_per_machine", lambda *_: told.set())
    with listening(pass_on) as at:
        assert meeting._reached(RemoteStore(at, "sites", 60.0), 60.0).port == int(at.rpartition(":")[2])
    assert told.is_set()


def waits_for_a_late_site(rank: int) -> list[str]:
    """Site 1 comes once site 0 has said that it waits for it."""
    logs.REMIND_EVERY = 0.2
    optimizer = loco.PulseLoCo(Scripted(parameters(3, 1003), 3, rank), topology=loco.Topology())
    warnings = kept_warnings()

    def notice() -> None:
        while not any("still waiting" in text and "site 1" in text for text in warnings):
            time.sleep(0.05)
        tell("come")

    if rank == 0:
        threading.Thread(target=notice, daemon=True).start()
    else:
        hear("come")
    optimizer.sync()
    return warnings


def test_a_round_that_waits_for_a_site_says_for_which() -> None:
    told = run_ranks(2, waits_for_a_late_site)
    texts = [text for text in told[0] if text.startswith("still waiting after")]
    assert texts[0].endswith("s: round 1, announcement: site 1")
