"""Mistakes around sites that come and go end in a sentence; none of this needs torchft."""

import sys

import pytest

import loco


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sites": 0}, r"sites \(LOCO_SITES\) must be a whole number >= 1, got 0"),
        ({"sites": 2, "timeout": 0.0}, "timeout must be > 0 seconds, got 0.0"),
        ({"sites": 2, "dead_after": -1.0}, "dead_after must be > 0 seconds, got -1.0"),
        ({"sites": 2, "at": "here"}, "an address is host:port"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_LIGHTHOUSE", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=said):
        loco.Sites(site="a", **arguments)


def test_a_site_of_several_ranks_can_t_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="have one process each, and this one's world has 2: give at="):
        loco.Sites(2, site="a", lighthouse="http://127.0.0.1:1")


def test_without_torchft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=r"need torchft, loco's extra `elastic` .*: pip install 'torchft>=0\.2'"
    ):
        loco.Sites(2, site="a", lighthouse="http://127.0.0.1:1")


def test_a_lighthouse_that_is_not_there_is_named() -> None:
    pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    with pytest.raises(loco.TransportError, match="no lighthouse answers at http://127"):
        loco.Sites(2, site="a", lighthouse="http://127.0.0.1:1")
