"""Links and messages: what a peer can make a rank take, and what is left when links are given up."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import INTERRUPTIONS, MEMORY
from sites import error_of, hear, run_ranks, tell

import loco
from loco.coordination.hosted_store import host_at_port
from loco.errors import TransportError, WireError
from loco.net.links import Links
from loco.net.listening import Endpoint
from loco.round.joining.recovery import MOST_HEAD_BYTES, take_head

_HOST = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


def closed_twice(rank: int) -> tuple[bool, bool, str]:
    topology = loco.Topology()
    link, _ = topology.connect(torch.device("cpu"), "test/0")
    link.swap_records(b"\0", phase="linked")  # or this rank might hang up while the other one still links
    link.close()
    link.close()
    topology.all_ranks().close()  # which is not its to close
    gone = error_of(lambda: link.swap_records(b"\0", phase="after it"))[0]
    return dist.is_initialized(), dist.group.WORLD is not None, gone


def test_links_that_are_closed_twice_leave_the_world_as_it_is() -> None:
    assert run_ranks(2, closed_twice) == [(True, True, "TransportError")] * 2


def held_messages(rank: int) -> tuple[str, str]:
    """Rank 0 gives up links while a message of them is kept, as by the traceback of an error."""
    topology = loco.Topology(timeout=30.0, dead_after=20.0)
    link, _ = topology.connect(torch.device("cpu"), "test/0")
    if rank == 0:
        kept = link.post([], [(1, torch.empty(1, dtype=torch.uint8))], phase="kept")
        hear("rank 1 waits")
        link.close()
        hear("rank 1 knows")
        del kept
        return "", ""
    threading.Timer(1.0, tell, ["rank 1 waits"]).start()
    error = error_of(lambda: link.swap({}, {0: torch.empty(1, dtype=torch.uint8)}, phase="waiting"))
    tell("rank 1 knows")
    return error


def test_links_that_are_given_up_are_closed_whoever_keeps_a_message() -> None:
    kind, text = run_ranks(2, held_messages)[1]
    assert kind == "TransportError"
    assert text.startswith("waiting: lost site 0")


def announcing(rank: int, size: int) -> tuple[str, str]:
    all_ranks = loco.Topology().all_ranks()
    if rank == 0:
        all_ranks.swap({1: all_ranks.message(size.to_bytes(8, "little"))}, {}, phase="x")
        return "", ""
    return error_of(lambda: all_ranks.receive_blob(0, phase="state for sites that join"))


@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1])
def test_a_blob_that_fits_no_memory_is_refused_by_name(size: int) -> None:
    kind, text = run_ranks(2, announcing, size)[1]
    assert kind == "WireError"
    assert text.startswith(f"state for sites that join: site 0 announces {size:,} bytes; at most ")


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"round": 1}',
        b'{"round": "1", "digests": []}',
        b'{"round": true, "digests": []}',
        b'{"round": 1, "digests": [7]}',
        b'{"round": 1, "digests": [], "took_part": {"a": "b"}}',
        b'{"round": 1, "digests": [], "more": 1}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_head_that_says_nothing_is_a_wire_error(blob: bytes) -> None:
    def receive_blob(peer: int, *, phase: str, most: int) -> bytes:
        assert most == MOST_HEAD_BYTES
        return blob

    link: Any = SimpleNamespace(receive_blob=receive_blob, called="site {}".format)
    with pytest.raises(WireError, match="taking θ from site 3: it does not say what it gives"):
        take_head(link, 3)


def first_of_two(port: int, *, timeout: float, dead_after: float) -> Links:
    return Links(
        "a",
        store=f"127.0.0.1:{port}",
        member=0,
        names=["a", "b"],
        endpoint=Endpoint("127.0.0.1"),
        timeout=timeout,
        dead_after=dead_after,
    )


def test_a_member_that_dies_while_links_are_built_is_one_less_in_the_next_quorum() -> None:
    """Its silence does not end the run, as that of a rank of this site would."""
    hosted = host_at_port([])
    hosted.store.set("loco/a/here/0/1", "")
    with pytest.raises(TransportError, match="linking 2 sites: no heartbeat from site b") as raised:
        first_of_two(hosted.port, timeout=60.0, dead_after=0.5)
    assert not raised.value.lasting


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_links_to_a_store_whose_host_is_stopped_are_given_up_in_time(delay: float) -> None:
    """Before they are built, or while this member waits for the other one."""
    host = subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        stop = threading.Timer(delay, os.kill, (host.pid, signal.SIGSTOP))
        stop.start()
        if not delay:
            stop.join()
        began = time.monotonic()
        with pytest.raises(
            TransportError, match=r"linking 2 sites: (no answer within|what listens at .* does not answer)"
        ):
            first_of_two(port, timeout=3.0, dead_after=2.0)
        assert time.monotonic() - began < 10.0
    finally:
        host.kill()
        host.communicate()


def left_behind(rank: int) -> list[tuple[int, int]]:
    """(descriptors, threads) after a topology and an optimizer were dropped."""
    found = []
    for _ in range(4):
        topology = loco.Topology()
        optimizer = loco.PulseLoCo(Scripted(parameters(1, 2003), 1, rank), sync_every=1, topology=topology)
        optimizer.step()
        dist.barrier()
        topology.close()
        del optimizer, topology
        gc.collect()
        dist.barrier()
        deadline = time.monotonic() + 20.0  # gloo's threads end on their own
        while time.monotonic() < deadline and found and found[-1] != held():
            time.sleep(0.1)
        found.append(held())
        dist.barrier()
    return found


def held() -> tuple[int, int]:
    """Without the thread that tells of waits, which ends some seconds after the last of them."""
    tells = sum(thread.name == "loco tells of waits" for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - tells


@pytest.mark.check(MEMORY)
def test_a_topology_and_an_optimizer_that_are_dropped_leave_no_descriptor_and_no_thread() -> None:
    for found in run_ranks(2, left_behind):
        assert len(set(found[1:])) == 1, found  # the first one leaves what torch keeps for the process


def reconnected(rank: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    optimizer = loco.PulseLoCo(Scripted(parameters(1, 2003), 1, rank), sync_every=1)
    keys = []
    for _ in range(4):
        optimizer._loop.views.reconnect()
        optimizer.step()
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    return keys


def test_a_reconnection_leaves_no_key_in_the_store() -> None:
    for keys in run_ranks(2, reconnected):
        assert len(set(keys[1:])) == 1, keys
