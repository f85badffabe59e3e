"""Sites that each have a world of their own train as sites that share one, bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import python_path
from scripted import Scripted, parameters
from selection import CHECKPOINTS, FLEETS
from sites import error_of, free_port, run_ranks, run_worlds
from states import Snapshot, assert_same, snapshot

import loco
from loco.coordination import hosted_store

NUMEL, STEPS, ROUNDS = 2003, 2, 4


def optimizer_over(topology: loco.SiteTopology, kind: str) -> tuple[loco.LowCommunicationOptimizer, Scripted]:
    inner = Scripted(parameters(7, NUMEL), 3, topology.site)
    return getattr(loco, kind)(inner, sync_every=STEPS, topology=topology), inner


def trained(topology: loco.SiteTopology, kind: str) -> tuple[int, Snapshot]:
    optimizer, _ = optimizer_over(topology, kind)
    for _ in range(STEPS * ROUNDS):
        optimizer.step()
    assert optimizer.round == ROUNDS
    return topology.site, snapshot(optimizer)


def in_a_world_of_its_own(rank: int, kind: str) -> tuple[int, Snapshot]:
    return trained(loco.Sites(), kind)


def in_one_world(rank: int, kind: str, ranks: int) -> tuple[int, Snapshot]:
    return trained(loco.Topology(ranks_per_site=ranks), kind)


@pytest.mark.check(FLEETS, sample="PulseLoCo-2-2")
@pytest.mark.parametrize(
    ("kind", "sites", "ranks"), [("PulseLoCo", 3, 1), ("PulseLoCo", 2, 2), ("DiLoCo", 2, 1)]
)
def test_worlds_of_their_own_train_as_one_world_does(kind: str, sites: int, ranks: int) -> None:
    names = ["berlin", "amsterdam", "paris"][:sites]  # numbered as amsterdam, berlin, paris
    told = run_worlds(names, ranks, in_a_world_of_its_own, kind)
    expected = run_ranks(sites * ranks, in_one_world, kind, ranks)
    for number, name in enumerate(sorted(names)):
        for rank, (site, state) in enumerate(told[names.index(name)]):
            assert site == number
            assert_same(state, expected[number * ranks + rank][1])


def knows_itself(rank: int) -> str:
    return repr(loco.Sites(2, dead_after=1.0))


def test_a_site_knows_itself() -> None:
    told = run_worlds(["b", "a"], 1, knows_itself)
    for name, number, [said] in zip("ba", (1, 0), told, strict=True):
        assert said == f"Sites(site={name!r}): this is site {number} of 2, rank 0 of 1 in it"


def joins(rank: int, changes: dict[str, dict[str, str]]) -> tuple[str, str]:
    os.environ.update(changes.get(f"{os.environ['LOCO_SITE']}/{rank}", {}))
    return error_of(lambda: loco.Sites(patience=6.0, dead_after=1.0))


@pytest.mark.check(FLEETS, sample=r"numbers")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"b/0": {"LOCO_SITES": "3"}},
            r"site [ab] expects [23] sites, site [ab] [23]: start all with the same",
        ),
        (
            {"b/0": {"LOCO_SITE": "a"}},
            "site a is here already, in process .* give every site a name of its own",
        ),
    ],
    ids=["numbers", "names"],
)
def test_sites_that_do_not_fit_say_why(changes: dict[str, dict[str, str]], expected: str) -> None:
    told = [one[0] for one in run_worlds(["a", "b"], 1, joins, changes)]
    refused = [text for kind, text in told if kind == "AgreementError"]
    assert refused
    assert all(re.match(expected, text) for text in refused)
    assert all(kind == "AgreementError" or "1 of 2 sites are here" in text for kind, text in told)


def test_a_world_that_holds_two_sites_says_so() -> None:
    told = run_worlds(["a", "b"], 2, joins, {"b/1": {"LOCO_SITE": "a"}})
    for kind, text in told[1]:
        assert kind == "AgreementError"
        assert "every site needs a world, so a torchrun, of its own" in text
    assert "1 of 2 sites are here (a)" in told[0][0][1]


def comes_with_other_ranks(rank: int) -> tuple[str, str]:
    """Sites a (two ranks) and b (one rank): the ranks of site b that are too many do not come."""
    if os.environ["LOCO_SITE"] == "b":
        dist.barrier()  # nobody is still building the group
        if rank:
            return "", ""
        dist.destroy_process_group()
        os.environ["WORLD_SIZE"] = "1"
    return error_of(lambda: loco.Sites(patience=6.0, dead_after=1.0))


def test_all_sites_have_equally_many_ranks() -> None:
    told = run_worlds(["a", "b"], 2, comes_with_other_ranks)
    for kind, text in (*told[0], told[1][0]):
        assert kind == "AgreementError"
        assert re.search(r"site [ab] has [12] ranks, site [ab] [12]: each rank exchanges with those of", text)
    assert told[0][1][1].startswith("this site's first rank: ")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"LOCO_SITES": "2", "LOCO_AT": "127.0.0.1:1"},
            "what this site is called: give site=… or set LOCO_SITE",
        ),
        (
            {"LOCO_SITE": "a", "LOCO_AT": "127.0.0.1:1"},
            "how many sites there are: give sites=… or set LOCO_SITES",
        ),
        ({"LOCO_SITE": "a", "LOCO_SITES": "2"}, "where the sites meet: give at=… or set LOCO_AT"),
        ({"LOCO_SITE": "a", "LOCO_SITES": "two", "LOCO_AT": "x:1"}, "must be a whole number >= 1, got 'two'"),
        ({"LOCO_SITE": "a", "LOCO_SITES": "2", "LOCO_AT": "here"}, "an address is host:port, such as"),
        ({"LOCO_SITE": "a", "LOCO_SITES": "2", "LOCO_AT": "no.such.invalid:1"}, "can't be looked up"),
    ],
)
def test_what_is_missing_is_said(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(expected)):
        loco.Sites()


def saves_and_goes_on(rank: int, folder: str, rounds: int, name: str) -> tuple[Snapshot, int]:
    os.environ["LOCO_SITE"] = name or os.environ["LOCO_SITE"]
    optimizer, inner = optimizer_over(loco.Sites(), "PulseLoCo")
    checkpoints = loco.Checkpoints(f"{folder}/{os.environ['LOCO_SITE'] if not name else 'a'}")
    resumed = checkpoints.load(optimizer)
    inner.count = resumed.extra if resumed else 0
    while optimizer.round < rounds or inner.count % STEPS != 1:
        optimizer.step()
    checkpoints.save(optimizer, inner.count)
    checkpoints.wait()
    return snapshot(optimizer), inner.count


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_site_resumes_from_a_folder_of_its_own_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    names = ["a", "b"]
    run_worlds(names, ranks, saves_and_goes_on, str(tmp_path / "parts"), 2, "")
    resumed = run_worlds(names, ranks, saves_and_goes_on, str(tmp_path / "parts"), 4, "")
    straight = run_worlds(names, ranks, saves_and_goes_on, str(tmp_path / "whole"), 4, "")
    for one, other in zip(chain(*resumed), chain(*straight), strict=True):
        assert one[1] == other[1] == 4 * STEPS + 1
        assert_same(one[0], other[0])


PROGRAM = """
import time
import torch, loco
from scripted import Scripted, parameters
torch.set_num_threads(1)
topology = loco.Sites(dead_after=2.0)
optimizer = loco.PulseLoCo(Scripted(parameters(7, 2003), 3, topology.site), sync_every=1, topology=topology)
for _ in range(3):
    optimizer.step()
if topology.site == 1:
    time.sleep(1.5)
    optimizer.settle()
    topology.rendezvous.exchange_notes({}, "asks the store") if topology.num_sites == 1 else None
    print("done", optimizer.round, flush=True)
"""


@pytest.mark.check(FLEETS)
def test_the_store_outlives_its_hosts_program_as_long_as_others_need_it() -> None:
    """Site a hosts it, and ends first."""
    told = {"LOCO_SITES": "2", "LOCO_AT": f"127.0.0.1:{free_port()}", "OMP_NUM_THREADS": "1"}
    told["PYTHONPATH"] = python_path()
    running = {}
    for name in ("a", "b"):
        running[name] = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | told | {"LOCO_SITE": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.5)
    ended = {}
    for name, process in running.items():
        said, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        ended[name] = said, errors
    assert ended["b"][0] == "done 3\n"
    assert "no answer" not in ended["b"][1]


def trains_and_hosts(rank: int) -> tuple[int, bool]:
    hosted: list[bool] = []

    def host_at(host: str, port: int) -> object:
        store = hosted_store.host_at(host, port)
        hosted.append(store is not None)
        return store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loco.members.meeting.host_at", host_at)
        optimizer = optimizer_over(loco.Sites(dead_after=2.0), "PulseLoCo")[0]
    for _ in range(STEPS * ROUNDS):
        optimizer.step()
    return optimizer.round, any(hosted)


@pytest.mark.check(FLEETS)
def test_sites_meet_at_a_store_that_none_of_them_hosts() -> None:
    """So none has to serve the others when it ends; and a second run meets there."""
    at = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "loco", "meet", at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            assert f"LOCO_AT=<this machine>:{at.rpartition(':')[2]}" in host.stdout.readline()
            again = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (again.returncode, again.stdout) == (2, "")
            assert "is not an address of this machine, or is in use" in again.stderr
            for _ in range(2):
                assert run_worlds(["a", "b"], 1, trains_and_hosts, at=at) == [[(ROUNDS, False)]] * 2
            host.send_signal(signal.SIGINT)
            assert host.wait(timeout=30) == 130
        finally:
            host.kill()


def knows_its_site_by_variables(rank: int) -> tuple[str, int]:
    optimizer = loco.PulseLoCo(Scripted(parameters(7, NUMEL), 3, 0))
    return type(optimizer.topology).__name__, optimizer.topology.num_sites


def test_an_optimizer_that_is_told_nothing_goes_by_the_variables() -> None:
    assert run_worlds(["a", "b"], 1, knows_its_site_by_variables) == [[("Sites", 2)]] * 2
    assert run_ranks(2, knows_its_site_by_variables) == [("Topology", 2)] * 2


def joins_twice(rank: int, closes: bool) -> tuple[int, Snapshot]:
    """Without a new process in between."""
    first = loco.Sites(dead_after=1.0)
    optimizer, inner = optimizer_over(first, "PulseLoCo")
    for _ in range(STEPS * 2):
        optimizer.step()
    saved, count = optimizer.state_dict(), inner.count
    if closes:
        first.close()
    again = loco.Sites(dead_after=1.0)
    assert first.closed
    optimizer, inner = optimizer_over(again, "PulseLoCo")
    optimizer.load_state_dict(saved)
    inner.count = count
    for _ in range(STEPS * (ROUNDS - 2)):
        optimizer.step()
    return again.site, snapshot(optimizer)


@pytest.mark.check(FLEETS, sample="True")
@pytest.mark.parametrize("closes", [True, False])
def test_sites_come_together_again_in_the_same_processes(closes: bool) -> None:
    twice = run_worlds(["a", "b"], 2, joins_twice, closes)
    once = run_worlds(["a", "b"], 2, in_a_world_of_its_own, "PulseLoCo")
    for one, other in zip(chain(*twice), chain(*once), strict=True):
        assert one[0] == other[0]
        assert_same(one[1], other[1])


def with_a_key(rank: int, keys: dict[str, bytes | None]) -> tuple[str, str]:
    key = keys[os.environ["LOCO_SITE"]]
    return error_of(lambda: trained(loco.Sites(key=key, patience=60.0, dead_after=3.0), "PulseLoCo"))


def test_sites_with_one_key_train_and_others_are_refused() -> None:
    one, other = b"0123456789abcdef", b"fedcba9876543210"
    assert run_worlds(["a", "b"], 1, with_a_key, {"a": one, "b": one}) == [[("", "nothing was raised")]] * 2
    for keys, error in (((one, other), "AuthenticationError"), ((one, None), "AgreementError")):
        told = run_worlds(["a", "b"], 1, with_a_key, dict(zip("ab", keys, strict=True)))
        assert error in {site[0][0] for site in told}
        assert all(site[0][0] for site in told)


def trains_behind_an_address_of_another_machine(rank: int, host: str) -> tuple[int, bool]:
    os.environ["LOCO_ADVERTISE"] = host
    return trains_and_hosts(rank)


def test_who_is_advertised_as_the_meetings_host_hosts_it_and_reaches_it_without_that_address() -> None:
    """203.0.113.5 is nobody's."""
    at = f"203.0.113.5:{free_port()}"
    assert run_worlds(["a"], 1, trains_behind_an_address_of_another_machine, "203.0.113.5", at=at) == [
        [(ROUNDS, True)]
    ]


def test_sites_meet_and_link_by_ipv6() -> None:
    at = f"[::1]:{free_port()}"
    found = run_worlds(["a", "b"], 1, trains_and_hosts, at=at)
    assert sorted(hosts for [(_, hosts)] in found) == [False, True]
    assert all(rounds == ROUNDS for [(rounds, _)] in found)
