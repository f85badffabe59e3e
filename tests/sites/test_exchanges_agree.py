"""How entries travel changes no bit of a round: neither exchange nor code nor the number of frames."""

from typing import Any

import pytest
from scripted import Scripted, parameters
from selection import PRODUCTS
from sites import run_ranks
from states import Snapshot, assert_same, snapshot

import loco

ROUNDS = 4
WAYS: list[dict[str, Any]] = [
    *({"exchange": exchange, "wire": wire} for exchange in ("gather", "owner") for wire in ("fast", "tight")),
    {"exchange": "dense"},
    {},
]


def every_way(rank: int, numel: int, frame: int, options: dict[str, Any]) -> list[list[Any]]:
    """-> the state and the report after each round, for each way"""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loco.wire.framing.LEAST", frame)
        patch.setattr("loco.wire.framing.MOST", frame)
        for way in WAYS:
            inner = Scripted(parameters(5, numel), 5, rank)
            optimizer = loco.PulseLoCo(inner, sync_every=2, **options, **way)
            rounds = []
            for _ in range(2 * ROUNDS):
                optimizer.step()
                if optimizer.local_step == 0:
                    rounds.append((snapshot(optimizer), optimizer.last_report))
            results.append(rounds)
    return results


@pytest.mark.check(PRODUCTS, sample="3-1003-256-options1")
@pytest.mark.parametrize(
    ("sites", "numel", "frame", "options"),
    [
        (2, 1003, 1 << 21, {}),
        (3, 1003, 256, {}),  # slices of 512, 491 and no elements; two frames, of which some are empty
        (4, 5003, 512, {"outer_momentum": 0.0, "outer_lr": 1.0}),
        (3, 5003, 1024, {"gate_gain": 3.5}),
        (3, 1003, 1 << 21, {"gate": "fp8_e4m3"}),
        (3, 5003, 1 << 21, {"value_steps": 8, "gate_margin": 0.5}),
        (2, 20, 1 << 21, {}),  # a slice without elements
        (3, 5003, 512, {"value_steps": 8, "sums_margin": 0.5}),
        (
            3,
            600,
            1 << 21,
            {"value_steps": 2, "gate_margin": 0.25, "sums_margin": 1.0},
        ),  # the last has no slice
    ],
)
def test_every_exchange_and_code_gives_the_same_bits(
    sites: int, numel: int, frame: int, options: dict[str, Any]
) -> None:
    for of_rank in run_ranks(sites, every_way, numel, frame, options):
        first = of_rank[0]
        for way, rounds in zip(WAYS, of_rank, strict=True):
            for (expected, plain), (got, report) in zip(first, rounds, strict=True):
                assert_same(expected, got)
                assert report.entries == plain.entries
                assert report.exchange == way.get("exchange", report.exchange)
                assert report.wire == (
                    "float32" if report.exchange == "dense" else way.get("wire", report.wire)
                )


def by_wire(rank: int, wire: str) -> tuple[Snapshot, Any]:
    optimizer = loco.DiLoCo(Scripted(parameters(5, 5003), 5, rank), sync_every=2, wire=wire)
    for _ in range(4):
        optimizer.step()
    return snapshot(optimizer), optimizer.last_report


@pytest.mark.check(PRODUCTS, sample=r"int8-3\.8")
@pytest.mark.parametrize(("wire", "share"), [("bfloat16", 2), ("int8", 3.8)])
def test_sites_agree_where_values_are_rounded_on_the_way(wire: str, share: float) -> None:
    exact, rounded = run_ranks(3, by_wire, "float32"), run_ranks(3, by_wire, wire)
    for state, report in rounded:
        for name in ("anchor", "momentum", "weights"):
            assert (state[name] == rounded[0][0][name]).all()
        assert (state["anchor"] != exact[0][0]["anchor"]).any()
        assert report.wire == wire
        # Headers and votes are what it is not smaller by.
        assert report.sent_bytes < exact[0][1].sent_bytes / share * 1.1 + 1000


def codes_of_their_own(rank: int) -> Snapshot:
    wire = ("tight", "fast", "auto")[rank]
    optimizer = loco.PulseLoCo(Scripted(parameters(5, 5003), 5, rank), sync_every=2, wire=wire)
    for _ in range(8):
        optimizer.step()
    return snapshot(optimizer)


def test_each_site_may_choose_its_code() -> None:
    states = run_ranks(3, codes_of_their_own)
    for state in states:
        assert (state["anchor"] == states[0]["anchor"]).all()


def test_what_a_wire_cannot_do_is_refused(single_site: None) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"wire": "int8"}, "wire must be one of auto, fast, tight, got 'int8'"),
        ({"exchange": "dense", "wire": "tight"}, "exchange='dense' sends every element as FP32"),
        ({"gate": "open", "exchange": "owner"}, "gate='open' sends every element as FP32"),
        ({"exchange": "ring"}, "exchange must be one of auto, gather, owner, dense, got 'ring'"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            loco.PulseLoCo(Scripted(parameters(5, 20), 5, 0), **options)
    with pytest.raises(ValueError, match="wire must be one of float32, bfloat16, int8, got 'tight'"):
        loco.DiLoCo(Scripted(parameters(5, 20), 5, 0), wire="tight")
