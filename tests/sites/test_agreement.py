"""Before the first round the sites prove that they were built alike, and start alike."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted, bits, flat, parameters
from sites import error_of, run_ranks

import loco
from loco.net.transport import Transport


def disagree(rank: int) -> list[tuple[str, str]]:
    def build(kind: Any = loco.PulseLoCo, numel: int = 1003, bf16: bool = False, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        return kind(Scripted(parameters(0, numel, bf16), 0, rank), **options)

    odd = rank == 1
    attempts = [
        lambda: build(sync_every=16 if odd else 8),
        lambda: build(outer_lr=0.5 if odd else 0.7),
        lambda: build(outer_momentum=0.0 if odd else 0.9),
        lambda: build(nesterov=not odd),
        lambda: build(gate_gain=7.0 if odd else 1.0),
        lambda: build(gate_margin=0.25 if odd else 0.0),
        lambda: build(value_steps=16 if odd else None),
        lambda: build(exchange="gather" if odd else "auto"),
        lambda: build(kind=loco.DiLoCo if odd else loco.PulseLoCo, gate=None if odd else "open"),
        lambda: build(numel=1004 if odd else 1003),
        lambda: build(bf16=odd),
        lambda: loco.Topology(ranks_per_site=3 if odd else 1),
        # A rank that can't be built tells the others, who would wait for it.
        lambda: loco.PulseLoCo(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.float64 if odd else None))], lr=1)
        ),
        lambda: build(sync_every=8.0 if odd else 8, outer_lr=1 if odd else np.float64(1), nesterov=1),
    ]
    return [error_of(attempt) for attempt in attempts]


def test_sites_that_were_built_differently_all_learn_what_differs() -> None:
    expected = [
        "the sites differ in sync_every: site 0 has 8, site 1 has 16",
        "the sites differ in outer_lr: site 0 has 0.7, site 1 has 0.5",
        "the sites differ in outer_momentum: site 0 has 0.9, site 1 has 0.0",
        "the sites differ in nesterov: site 0 has True, site 1 has False",
        "the sites differ in gate_gain: site 0 has 1.0, site 1 has 7.0",
        "the sites differ in gate_margin: site 0 has 0.0, site 1 has 0.25",
        "the sites differ in value_steps: site 0 has None, site 1 has 16",
        "the sites differ in exchange: site 0 has auto, site 1 has gather",
        "the sites differ in kind: site 0 has PulseLoCo, site 1 has DiLoCo",
        "the sites differ in parameters (number 3): site 0 has ['group0.param3', [990], 'torch.float32'], "
        "site 1 has ['group0.param3', [991], 'torch.float32']",
        "the sites differ in parameters (number 3): site 0 has ['group0.param3', [990], 'torch.float32'], "
        "site 1 has ['group0.param3', [990], 'torch.bfloat16']",
        "ranks_per_site differs: rank 0 has 1, rank 1 of 3 has 3",
    ]
    broken = "group0.param0 is torch.float64; loco synchronises float32, bfloat16 and float16"
    for rank, errors in enumerate(run_ranks(3, disagree)):
        assert [text for _, text in errors[:12]] == expected
        assert {kind for kind, _ in errors[:12]} == {"AgreementError"}
        if rank == 1:
            assert errors[12] == ("ValueError", f"parameter {broken}")
        else:
            said = f"site 1 could not be built: ValueError: parameter {broken}"
            assert errors[12] == ("AgreementError", said)
        assert errors[13] == ("", "nothing was raised")  # 8.0 is 8


def first_anchor(rank: int) -> dict[str, Any]:
    params = parameters(seed=rank, numel=1003, bf16=True)
    loco.PulseLoCo(torch.optim.SGD(params, lr=0.1))
    return {"weights": bits(flat(params)), "own": bits(flat(parameters(rank, 1003, bf16=True)))}


def damaged_first_anchor(rank: int) -> tuple[str, str]:
    broadcast = Transport.broadcast

    def damage(self: Transport, tensor: torch.Tensor, *, phase: str) -> None:
        broadcast(self, tensor, phase=phase)
        if rank == 1:
            tensor.view(torch.int32)[500] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "broadcast", damage)
        return error_of(lambda: loco.DiLoCo(Scripted(parameters(0, 1003), 0, rank)))


def test_a_first_anchor_that_did_not_arrive_whole_is_noticed_by_all() -> None:
    expected = "ReplicaError", "site 1 did not receive the anchor that site 0 sent"
    assert run_ranks(3, damaged_first_anchor) == [expected] * 3


def test_all_sites_start_from_site_0s_weights() -> None:
    results = run_ranks(2, first_anchor)
    assert not np.array_equal(results[0]["own"], results[1]["own"])
    for result in results:
        np.testing.assert_array_equal(result["weights"], results[0]["own"])
