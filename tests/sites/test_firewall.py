"""Sites behind firewalls: they train if the ports that the documentation names are open, and both are told of
a closed one within seconds, by its address."""

import re
import time

import pytest
from isolated_sites import MEETING, run_in_networks
from scripted import Scripted, parameters
from switch import Conditions, Switch, why_not

import loco
from loco.logs import SAY_SOON

pytestmark = [pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


def trains() -> tuple[str, float]:
    """-> the error that came, or "" after a few rounds; and after how many seconds."""
    began = time.monotonic()
    try:
        inner = Scripted(parameters(3, 1003), 3, 0)
        optimizer = loco.PulseLoCo(inner, sync_every=1, topology=loco.Sites(patience=20.0, dead_after=2.0))
        for _ in range(3):
            optimizer.step()
        return "", time.monotonic() - began
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began


def run(ports: list[int], **variables: str) -> tuple[dict[str, tuple[str, float]], int]:
    """Two sites, between which only these ports are open -> what came of each; packets that were filtered."""
    names = ("berlin", "paris")
    with Switch(Conditions(open_ports=frozenset(ports))) as switch:
        found = run_in_networks(switch, dict.fromkeys(names, variables), trains)
        return dict(zip(names, found, strict=True)), switch.counts()["filtered"]


def test_with_the_documented_ports_open_sites_train() -> None:
    found, filtered = run([MEETING, *range(29511, 29514)], LOCO_PORTS="29511-29513")
    assert {said for said, _ in found.values()} == {""}
    assert filtered == 0


def test_a_closed_port_is_named_on_both_sides_within_ten_seconds() -> None:
    found, filtered = run([MEETING])
    assert filtered > 0
    for said, seconds in found.values():
        assert re.search(
            r"paris can't reach berlin at 10\.0\.0\.1:\d+ \(it does not answer\): open that port", said
        )
        assert "LOCO_PORTS=29511-29520" in said
        assert seconds < 10 + SAY_SOON


def test_a_closed_meeting_port_is_an_error_that_names_it() -> None:
    found, _ = run(list(range(29511, 29514)), LOCO_PORTS="29511-29513")
    said, _ = found["paris"]
    assert said.startswith("TransportError: ")
    assert f"10.0.0.1:{MEETING}" in said
