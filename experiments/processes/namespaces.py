"""A network of this machine's own: each site a process with an interface of its own, joined by a bridge, with
links as slow as one likes.

    site 0's namespace        the hub's namespace        site 1's namespace
      eth0 ───────────────────── site0  bridge  site1 ───────────────────── eth0

Egress is shaped at `eth0`, ingress where the hub hands packets to the site. The namespaces have no names:
each lives as long as the process inside it, and these end with the process that made them, however that one
ends. So nothing can be left behind, and two networks can't collide.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TOOLS = ("ip", "tc", "nsenter", "unshare")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_QUEUE = "200ms"  # what a router holds back before it drops
MBIT, GBIT = 10**6 / 8, 10**9 / 8  # bytes per second


@dataclass(frozen=True)
class Counters:
    """What an interface has sent and received, Ethernet headers included."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(a - b for a, b in zip(vars(self).values(), vars(earlier).values(), strict=True)))


def counters(interface: str = "eth0", *, process: int | str = "self") -> Counters:
    """Of an interface of the namespace in which a process is."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            received, packets, *_ = numbers = [int(field) for field in fields.split()]
            return Counters(numbers[8], numbers[9], received, packets)
    raise OSError(f"this network namespace has no interface {interface}")


def leave_network() -> None:
    """Move the caller's process into an empty network namespace, before it has other threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")


@cache
def why_not() -> str | None:
    """Why this machine can't have such networks; None if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (iproute2, util-linux)"
    trial = (
        "ip link add name v0 type veth peer name v1 && ip link add name b0 type bridge"
        " && tc qdisc add dev v0 root tbf"
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{trial} rate 1mbit burst 16kb latency 50ms"],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
    return f"network namespaces with a bridge and tc tbf are not allowed here ({reason})"


class Network:
    """The hub. Enter it, `attach` processes that have called `leave_network`, and shape their links."""

    def __enter__(self) -> Network:
        # cat ends when this end of its pipe is closed, and with it the hub's namespace. A session of its own
        # keeps Ctrl-C from ending it before the sites.
        self._hub = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._sites: list[int] = []
        try:
            assert self._hub.stdout is not None
            self._hub.stdout.readline()  # it is in its namespace
            _inside(self._hub.pid, "ip link add bridge type bridge && ip link set bridge up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        self._hub.kill()
        self._hub.wait()
        self._hub.stdin.close()
        self._hub.stdout.close()

    def attach(self, pid: int) -> None:
        """Give a process, alone in its namespace, an interface on the bridge: 10.0.0.1 for the first."""
        port = f"site{len(self._sites)}"
        _inside(
            self._hub.pid,
            f"ip link add {port} type veth peer name eth0 netns {pid} && ip link set {port} master bridge up",
        )
        self._sites.append(pid)
        _inside(
            pid,
            "ip link set lo up"
            f" && ip address add 10.0.0.{len(self._sites)}/24 dev eth0 && ip link set eth0 up",
        )

    def cut(self, place: int, *, back: bool = False) -> None:
        """Take the link of the process that was attached as number `place` down, or `back` up."""
        _inside(self._hub.pid, f"ip link set site{place} {'up' if back else 'down'}")

    def shape(self, rate: float | None) -> None:
        """Let no link carry more than `rate` bytes a second in either direction; None: as fast as it goes."""
        for k, pid in enumerate(self._sites):
            for where, interface in ((pid, "eth0"), (self._hub.pid, f"site{k}")):
                # With none there is none to delete, which is what is wanted.
                _inside(where, f"tc qdisc del dev {interface} root 2>/dev/null || true")
                if rate is not None:
                    _inside(
                        where,
                        f"tc qdisc add dev {interface} root tbf rate {8 * rate:.0f}bit"
                        f" burst {burst(rate)} latency {_QUEUE}",
                    )


def burst(rate: float) -> int:
    """Bytes that may leave at once after a pause: two milliseconds' worth. With much less a link loses what
    it may send while a busy machine is late to wake it."""
    return max(round(rate / 500), 16_384)


def _inside(pid: int, commands: str) -> None:
    """Run shell commands in the namespace of a process."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-c", commands], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"{commands!r} failed: {done.stderr.strip() or done.returncode}")
