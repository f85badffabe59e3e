"""Mistakes around sites that come and go end in a sentence; none of this needs torchft."""

import os
import sys
from typing import Any

import pytest
from selection import FLEETS
from sites import error_of, run_ranks

import loco
from loco.members.elastic.elastic_sites import ElasticSites
from loco.members.elastic.quorum import Claim, of_site


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sites": 0}, r"sites \(LOCO_SITES\) must be a whole number >= 1, got 0"),
        ({"sites": 2, "timeout": 0.0}, "timeout must be > 0 seconds, got 0.0"),
        ({"sites": 2, "dead_after": -1.0}, "dead_after must be > 0 seconds, got -1.0"),
        ({"sites": 2, "at": "here"}, "an address is host:port"),
        ({"sites": 2, "key": bytes(15)}, "key must have at least 16 bytes"),
        ({"sites": 2, "at_least": 1}, r"knows how many sites are enough .*: leave out at_least"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_LIGHTHOUSE", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=said):
        loco.Sites(site="a", **arguments)


@pytest.mark.parametrize(
    ("at_least", "said"),
    [
        ("3", r"at_least \(LOCO_AT_LEAST\) must be at most the 2 sites, got 3"),
        ("0", r"at_least \(LOCO_AT_LEAST\) must be a whole number >= 1, got '0'"),
        ("a few", r"at_least \(LOCO_AT_LEAST\) must be a whole number >= 1, got 'a few'"),
    ],
)
def test_how_many_are_enough_is_a_number_of_sites(
    at_least: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCO_AT_LEAST", at_least)
    with pytest.raises(ValueError, match=said):
        loco.Sites(2, site="a", at="127.0.0.1:1")


def claim(ready: Any = True, **told: Any) -> Claim:
    same: dict[str, Any] = {"round": 3, "digest": "x", "setup": "same", "ready": ready}
    return Claim(**same | told)


def test_ranks_of_a_site_that_have_come_for_different_things_are_told_so() -> None:
    for ready, said in ((True, "rank 0 .* for a round, rank 1 "), (False, "rank 1 .* for a round, rank 0 ")):
        with pytest.raises(loco.AgreementError, match=said + "for θ alone: build the optimizer, load and"):
            of_site([claim(ready), claim(not ready)])


def test_a_site_of_which_a_rank_lacks_a_part_of_the_state_holds_none() -> None:
    assert of_site([claim(), claim()]).round == 3
    assert of_site([claim(), claim(round=-1)]).round == -1
    assert of_site([claim(round=4), claim()]).round == -1


def test_the_digest_of_a_site_is_of_all_its_ranks() -> None:
    digests = {of_site([claim(digest=a), claim(digest=b)]).digest for a in "xy" for b in "xy"}
    assert len(digests) == 4


def test_what_only_some_ranks_of_a_site_say_is_not_said_of_the_site() -> None:
    for field in ("links", "committed", "doubt"):
        said: dict[str, Any] = {field: "q1"}
        assert getattr(of_site([claim(**said), claim(**said)]), field) == "q1"
        assert getattr(of_site([claim(**said), claim()]), field) == ""


def differently_started(rank: int) -> tuple[str, str]:
    os.environ["LOCO_SITE"] = "ab"[rank]
    return error_of(lambda: loco.Sites(2, lighthouse="http://127.0.0.1:1"))


@pytest.mark.check(FLEETS)
def test_ranks_of_one_world_that_were_given_different_names_are_told_so() -> None:
    for kind, said in run_ranks(2, differently_started):
        assert kind == "AgreementError"
        assert "rank 1 with [2, 'b', None, 1, 'http://127.0.0.1:1']: every site needs a world" in said


def test_without_torchft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError,
        match=r"a lighthouse needs torchft, loco's extra `elastic` .*: pip install 'torchft>=0\.2'",
    ):
        loco.Sites(2, site="a", lighthouse="http://127.0.0.1:1")


def test_a_lighthouse_that_is_not_there_is_named() -> None:
    pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    with pytest.raises(loco.TransportError, match="no lighthouse answers at http://127"):
        ElasticSites(
            sites=2,
            name="a",
            lighthouse="http://127.0.0.1:1",
            timeout=60.0,
            dead_after=5.0,
            connect_timeout=1.0,
        )
