"""Where a rank listens, and what it tells the others."""

import socket
import threading

import pytest
from sites import free_port
from torch._C._distributed_c10d import HashStore

from loco.members.one_world import in_world
from loco.net import linking
from loco.net.introductions import PatientStore
from loco.net.linking import link
from loco.net.listening import Endpoint


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCO_PORTS", "LOCO_ADVERTISE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_it_listens_at_one_of_the_ports_that_are_free() -> None:
    first = free_port()
    endpoint = Endpoint.of(f"{first}-{first + 1}").at("127.0.0.1")
    one, _, port = endpoint.listen()
    with one:
        two, host, other = endpoint.listen()
        with two:
            assert (host, {port, other}) == ("127.0.0.1", {first, first + 1})
            with pytest.raises(
                OSError, match=f"none of the ports {first}-{first + 1} is free: give as many as"
            ):
                endpoint.listen()
        endpoint.listen()[0].close()


def test_a_port_is_free_again_while_connections_to_it_last() -> None:
    endpoint = Endpoint.of(str(free_port())).at("127.0.0.1")
    for _ in range(2):
        listener, host, port = endpoint.listen()
        with listener, socket.create_connection((host, port)):
            accepted, _ = listener.accept()
            listener.close()
            endpoint.listen()[0].close()
            accepted.close()


@pytest.mark.parametrize("said", ["0", "70000", "29520-29511", "29511-", "a", "29511,29512", "-1"])
def test_ports_that_are_none_are_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_PORTS", said)
    with pytest.raises(
        ValueError, match=r"ports \(LOCO_PORTS\) must be a port or a range, such as 29511-29520"
    ):
        Endpoint.of(None)


def test_an_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_PORTS", "29511")
    assert Endpoint.of("29512-29513").ports == range(29512, 29514)
    assert Endpoint.of(None).ports == range(29511, 29512)


@pytest.mark.parametrize(
    ("said", "host", "port"),
    [
        ("203.0.113.5", "203.0.113.5", 0),
        ("203.0.113.5:29600", "203.0.113.5", 29600),
        ("2001:db8::1", "2001:db8::1", 0),
        ("[2001:db8::1]:29600", "2001:db8::1", 29600),
    ],
)
def test_what_is_advertised(said: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_ADVERTISE", said)
    found = Endpoint.of(str(at := free_port()))
    assert (found.advertised, found.advertised_port) == (host, port)
    listener, told, told_port = found.listen()
    with listener:
        assert (told, told_port) == (host, port or at)
        assert listener.getsockname()[:2] == ("::" if ":" in host else "0.0.0.0", at)


@pytest.mark.parametrize(
    ("said", "ports"),
    [("203.0.113.5:29600", None), ("203.0.113.5:29600", "29511-29520"), (":1", "29511"), ("a:b", "1")],
)
def test_an_advertised_port_leads_to_one_port(
    said: str, ports: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCO_ADVERTISE", said)
    with pytest.raises(
        ValueError, match="LOCO_ADVERTISE must be a host; or host:port, and LOCO_PORTS the one port"
    ):
        Endpoint.of(ports)


def test_who_cant_be_reached_is_told_why_it_waits_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but what it tells leads to a port at which nobody does."""
    monkeypatch.setattr(linking, "_REACHED", 0.3)
    store, closed = HashStore(), free_port()
    behind = Endpoint("127.0.0.1", range(first := free_port(), first + 1), "127.0.0.1", closed)
    said: list[str] = []

    def member(me: int) -> None:
        try:
            link(
                PatientStore(store, limit=20.0, may_still_come=lambda: True),
                "a",
                me,
                2,
                endpoint=Endpoint("127.0.0.1") if me else behind,
                called=["berlin", "paris"].__getitem__,
            )
        except RuntimeError as error:
            said.append(str(error))

    threads = [threading.Thread(target=member, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith(
        f"paris can't reach berlin at 127.0.0.1:{closed} (Connection refused): open that"
    )


@pytest.mark.parametrize(("of_this_machine", "leads_here"), [("2", True), ("1", False)])
def test_the_stores_own_machine_tells_others_no_loopback_address(
    of_this_machine: str, leads_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a machine's own name is 127.0.1.1 to itself."""
    monkeypatch.setattr("loco.members.one_world.outward_address", lambda: "203.0.113.7")
    with socket.create_server(("127.0.0.1", 0)) as store:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1]), "WORLD_SIZE": "2"}
        for name, value in (told | {"LOCAL_WORLD_SIZE": of_this_machine}).items():
            monkeypatch.setenv(name, value)
        assert in_world(Endpoint()).host == ("127.0.0.1" if leads_here else "203.0.113.7")
