"""Sites behind firewalls: they train if the ports that the documentation names are open, and both are told of
a closed one within seconds, by its address."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scripted import Scripted, parameters
from sites import context
from switch import Conditions, Switch, why_not

import loco
from experiments.processes.namespaces import leave_network
from loco.logs import SAY_SOON

pytestmark = [pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
MEETING = 29510


def trains(variables: Mapping[str, str], end: Any) -> None:
    """Alone in its network -> the error that came, or "" after a few rounds; and after how many seconds."""
    leave_network()
    end.send("left")
    end.recv()
    os.environ.update(variables)
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        inner = Scripted(parameters(3, 1003), 3, 0)
        optimizer = loco.PulseLoCo(inner, sync_every=1, topology=loco.Sites(patience=20.0, dead_after=2.0))
        for _ in range(3):
            optimizer.step()
        end.send(("", time.monotonic() - began))
    except Exception as error:
        end.send((f"{type(error).__name__}: {error}", time.monotonic() - began))
    end.recv()


def run(ports: list[int], **variables: str) -> tuple[dict[str, tuple[str, float]], int]:
    """Two sites, between which only these ports are open -> what came of each; packets that were filtered."""
    names, processes, ends = ["berlin", "paris"], [], []
    with Switch(Conditions(open_ports=frozenset(ports))) as switch:
        try:
            for name in names:
                told = {"LOCO_SITES": "2", "LOCO_AT": f"10.0.0.1:{MEETING}", "LOCO_SITE": name} | variables
                ours, theirs = context.Pipe()
                process = context.Process(target=trains, args=(told, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
                assert ours.recv() == "left"
                switch.attach(process.pid or 0)
            for end in ends:
                end.send("attached")
            found = {name: end.recv() for name, end in zip(names, ends, strict=True)}
            return found, switch.counts()["filtered"]
        finally:
            for process in processes:
                process.kill()
                process.join()


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
