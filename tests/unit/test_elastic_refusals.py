"""Mistakes around sites that come and go end in a sentence; none of this needs torchft."""

import sys

import pytest

import loco


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sites": 0}, "sites must be >= 1, got 0"),
        ({"sites": 2, "timeout": 0.0}, "timeout must be > 0 seconds, got 0.0"),
        ({"sites": 2, "dead_after": -1.0}, "dead_after must be > 0 seconds, got -1.0"),
        ({"sites": 2}, "need a lighthouse: start one with `torchft_lighthouse"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match=said):
        loco.ElasticTopology(**arguments)


def test_without_torchft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=r"need torchft, loco's extra `elastic` .*: pip install 'torchft>=0\.2'"
    ):
        loco.ElasticTopology(sites=2, lighthouse="http://127.0.0.1:1")


def test_a_lighthouse_that_is_not_there_is_named() -> None:
    pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    with pytest.raises(loco.TransportError, match="no lighthouse answers at http://127"):
        loco.ElasticTopology(sites=2, lighthouse="http://127.0.0.1:1", connect_timeout=0.5)
