"""Where this machine listens for other ranks, and by which address they reach it."""

import errno
import fcntl
import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens, and where the others find it.

    Attributes:
        host: an address of this machine; "": that of its name, or that of the interface that
            GLOO_SOCKET_IFNAME names.
        ports: that may be used; empty: any.
        advertised: the host by which others reach this machine, if it is no address of its own, as behind
            NAT or in a container; "": `host`.
        advertised_port: there; 0: the port that is listened at.
    """

    host: str = ""
    ports: range = range(0)
    advertised: str = ""
    advertised_port: int = 0

    @classmethod
    def of(cls, ports: str | None) -> "Endpoint":
        """
        Args:
            ports: "29511-29520", or a single one; by default what LOCO_PORTS says. LOCO_ADVERTISE says what
                is advertised: a host, or host:port.

        Raises:
            ValueError: they say something else.
        """
        ports = ports or os.environ.get("LOCO_PORTS", "")
        said = os.environ.get("LOCO_ADVERTISE", "")
        found = cls(ports=_ports(ports) if ports else range(0))
        if not said:
            return found
        try:
            at = urlsplit(f"//[{said}]" if said.count(":") > 1 and "[" not in said else f"//{said}")
            host, port = at.hostname or "", at.port or 0
        except ValueError:
            host, port = "", 0
        if not host or (port and len(found.ports) != 1):
            raise ValueError(
                f"LOCO_ADVERTISE must be a host; or host:port, and LOCO_PORTS the one port that it leads to: "
                f"got {said!r} and LOCO_PORTS={ports}"
            )
        return replace(found, advertised=host, advertised_port=port)

    def at(self, host: str) -> "Endpoint":
        """The same at an address of this machine."""
        return replace(self, host=host)

    def listen(self) -> tuple[socket.socket, str, int]:
        """-> a listening socket, and the IP address and port to tell the others.

        Raises:
            OSError: this machine can't listen there.
        """
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        host = _address_of(interface) if interface else self.host
        if self.advertised:
            found = socket.getaddrinfo(self.advertised, 0, type=socket.SOCK_STREAM)[0]
            every = "::" if found[0] == socket.AF_INET6 else "0.0.0.0"
            listener = _bound([every], self.ports)
            return listener, str(found[4][0]), self.advertised_port or listener.getsockname()[1]
        listener = _bound([host] if host else [socket.gethostname(), "127.0.0.1"], self.ports)
        return listener, *listener.getsockname()[:2]


ANYWHERE = Endpoint()


def _ports(said: str) -> range:
    first, dash, last = said.partition("-")
    last = last if dash else first
    if first.strip().isdecimal() and last.strip().isdecimal() and 0 < int(first) <= int(last) < 65536:
        return range(int(first), int(last) + 1)
    raise ValueError(f"ports (LOCO_PORTS) must be a port or a range, such as 29511-29520; got {said!r}")


def _bound(hosts: list[str], ports: range) -> socket.socket:
    """A listening socket at the first of these hosts that this machine has, and at any of these ports."""
    failed: list[str] = []
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            failed.append(f"{host} ({error})")
            continue
        for family, _, _, _, at in found:
            try:
                return _at_a_port(str(at[0]), family, ports)
            except OSError as error:
                failed.append(f"{at[0]} ({error})")
    raise OSError(f"can't listen at {' or '.join(failed)}")


def _at_a_port(host: str, family: socket.AddressFamily, ports: range) -> socket.socket:
    for port in _shuffled(ports) if ports else [0]:
        try:
            return socket.create_server(cast(tuple[str, int], (host, port)), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not ports:
                raise
    raise OSError(
        f"none of the ports {ports[0]}-{ports[-1]} is free: give as many as there are ranks on a machine, or "
        f"more (LOCO_PORTS)"
    )


def _shuffled(ports: range) -> Iterator[int]:
    """So that ranks of one machine seldom try the same."""
    yield from random.SystemRandom().sample(ports, len(ports))


def _address_of(interface: str) -> str:
    """Raises: OSError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if (name, scope) == (interface, "00"):  # one that is not of this link only
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise OSError(f"GLOO_SOCKET_IFNAME: interface {interface!r} has no address")


def outward_address() -> str:
    """That of this machine on the way to the internet, to which nothing is sent; "": there is no way."""
    for family, there in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((there, 9))
            return str(probe.getsockname()[0])
    return ""
