"""A network whose packets pass through a program, which can lose, repeat, hold back and delay them.

    namespace 0                  the switch                 namespace 1
      eth0, a TUN device ─────── one process ─────── eth0, a TUN device

It has the methods of `experiments.processes.namespaces.Network`, and needs no queueing discipline of
the kernel.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from types import TracebackType

from sites import context

from experiments.processes.orphans import die_with_parent

_DEVICE = "/dev/net/tun"
_SET_INTERFACE, _PLAIN_IP = 0x400454CA, 0x5001  # TUNSETIFF; IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
_SET_OFFLOAD, _BY_KERNEL = (
    0x400454D0,
    3,
)  # TUNSETOFFLOAD; TUN_F_CSUM | TUN_F_TSO4: many packets are read as one
_AHEAD = 10  # bytes of the header that says so
_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_TCP, _SYN, _ACK = 6, 2, 16  # of an IPv4 header; of a TCP header
_HELD_BACK = 0.02  # seconds, in which others overtake
_QUEUE = 0.2  # seconds' worth of packets that a link of a rate holds back before it drops

Cut = tuple[int, int]  # no packet of the first process reaches the second


@dataclass(frozen=True)
class Conditions:
    """What happens to a packet.

    loss, duplication, reordering: shares of the packets.
    delay: seconds that each takes in one direction.
    rate: bytes a second that a process's link carries in either direction; None: as many as come.
    open_ports: where connections may be made to, as a firewall has them; None: everywhere.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.0
    rate: float | None = None
    open_ports: frozenset[int] | None = None


@cache
def why_not() -> str | None:
    """Why this machine can't have such a network; None if it can."""
    try:
        trial = ["unshare", "--net", "ip", "tuntap", "add", "dev", "t0", "mode", "tun"]
        done = subprocess.run(trial, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed (iproute2, util-linux)"
    if done.returncode == 0:
        return None
    return f"TUN devices in network namespaces are not allowed here ({done.stderr.strip()})"


class Switch:
    """Enter it, `attach` processes that have called `leave_network`, and `cut` what is between them.

    What it counts of packets: "passed", "lost", "repeated", "held back", "cut", "dropped" for those that
    found a link's queue full, and "filtered" for those of connections to closed ports.

    Args:
        conditions: of every packet.
        cuts: by the number of processes attached and that of one of them, what `cut` takes away; by default
            all that this one sends and receives.
        seed: of what happens by chance.
    """

    def __init__(
        self,
        conditions: Conditions,
        *,
        cuts: Callable[[int, int], set[Cut]] | None = None,
        seed: int = 0,
    ) -> None:
        self._conditions, self._cuts, self._seed = conditions, cuts or sent_or_received, seed
        self._attached = 0

    def __enter__(self) -> "Switch":
        self._link, theirs = context.Pipe()
        self._process = context.Process(
            target=_relay, args=(theirs, self._conditions, self._seed), daemon=True
        )
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._link.close()

    def attach(self, pid: int) -> None:
        """Give a process, alone in its namespace, an interface: 10.0.0.1 for the first."""
        self._ask("attach", pid)
        self._attached += 1

    def cut(self, place: int, *, back: bool = False) -> None:
        """Cut off the process that was attached as number `place`, or give all back."""
        self._ask("cut", set() if back else self._cuts(self._attached, place))

    def counts(self) -> Counter[str]:
        return self._ask("count", None)

    def _ask(self, what: str, value: object) -> Counter[str]:
        self._link.send((what, value))
        return self._link.recv()


def sent_or_received(size: int, place: int) -> set[Cut]:
    return sent(size, place) | received(size, place)


def sent(size: int, place: int) -> set[Cut]:
    return {(place, other) for other in range(size)}


def received(size: int, place: int) -> set[Cut]:
    return {(other, place) for other in range(size)}


def run_first(core: int = -1, before: int = 1) -> None:
    """From now on this process waits for no others that work, so that what takes time is the network, however
    busy the machine is.

    Args:
        core: the only one that it uses, of those that it may: the others go on.
        before: those with a smaller number.
    """
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(before))


def _relay(link: Connection, conditions: Conditions, seed: int) -> None:
    """The switch's process."""
    die_with_parent()
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    ports: list[int] = []
    cuts: set[Cut] = set()
    # Until when, a number, to whom, the packet, and whether the link to that one is yet to be passed.
    on_their_way: list[tuple[float, int, int, bytes, bool]] = []
    busy: defaultdict[tuple[int, str], float] = defaultdict(float)  # until when each link is, by direction
    if conditions.rate is not None:
        run_first(core=0, before=2)

    def through(link: tuple[int, str], packet: bytes, comes: float) -> float | None:
        """When a packet has passed a link; None: its queue is full."""
        if conditions.rate is None:
            return comes
        leaves = max(comes, busy[link]) + (len(packet) - _AHEAD) / conditions.rate
        if leaves - comes > _QUEUE:
            counts["dropped"] += 1
            return None
        busy[link] = leaves
        return leaves

    while True:
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            due, number, target, packet, is_behind = heappop(on_their_way)
            if is_behind and (comes := through((target, "in"), packet, due)) is not None:
                heappush(on_their_way, (comes, number, target, packet, False))
            elif not is_behind:
                os.write(ports[target], packet)
        wait = max(on_their_way[0][0] - time.monotonic(), 0.0) if on_their_way else None
        ready = select.select([link, *ports], [], [], wait)[0]
        if link in ready:
            what, value = link.recv()
            if what == "attach":
                ports.append(_port_in(value, len(ports), in_batches=conditions.rate is not None))
            elif what == "cut":
                cuts = value
            link.send(counts)
        for source, port in enumerate(ports):
            if port not in ready:
                continue
            packet = os.read(port, _AHEAD + (1 << 16))
            target = packet[_AHEAD + 19] - 1  # of the address that it is sent to, 10.0.0.x
            if packet[_AHEAD] >> 4 != 4 or not 0 <= target < len(ports):
                continue  # what IPv6 says to all
            if (source, target) in cuts:
                counts["cut"] += 1
            elif _is_filtered(packet[_AHEAD:], conditions.open_ports):
                counts["filtered"] += 1
            elif chance.random() < conditions.loss:
                counts["lost"] += 1
            else:
                due = through((source, "out"), packet, time.monotonic())
                if due is None:
                    continue
                copies = 1 + (chance.random() < conditions.duplication)
                counts["repeated"] += copies - 1
                for _ in range(copies):
                    held_back = chance.random() < conditions.reordering
                    counts["held back"] += held_back
                    counts["passed"] += 1
                    comes = due + conditions.delay + held_back * _HELD_BACK
                    heappush(on_their_way, (comes, counts["passed"], target, packet, True))


def _is_filtered(packet: bytes, open_ports: frozenset[int] | None) -> bool:
    """Whether it is the first of a TCP connection to a closed port."""
    header = packet[4 * (packet[0] & 15) :]
    is_first = packet[9] == _TCP and header[13] & (_SYN | _ACK) == _SYN
    return is_first and open_ports is not None and int.from_bytes(header[2:4], "big") not in open_ports


def _port_in(pid: int, number: int, *, in_batches: bool) -> int:
    """A new interface of that process's namespace; this end of it.

    in_batches: packets that TCP sends one after the other come as one, so that few are to be moved.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(there, _NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace of {pid}")
        port = os.open(_DEVICE, os.O_RDWR)
        fcntl.ioctl(port, _SET_INTERFACE, struct.pack("16sH22x", b"eth0", _PLAIN_IP))
        if in_batches:
            fcntl.ioctl(port, _SET_OFFLOAD, _BY_KERNEL)
        commands = (
            f"ip link set lo up && ip address add 10.0.0.{number + 1}/24 dev eth0 && ip link set eth0 up"
        )
        if in_batches:  # what it takes does not depend on the machine's choice, if it has this usual one
            commands += " && (echo cubic > /proc/sys/net/ipv4/tcp_congestion_control || true) 2> /dev/null"
        subprocess.run(["sh", "-c", commands], check=True)
        return port
    finally:
        libc.setns(home, _NETWORK)
        os.close(home)
        os.close(there)
