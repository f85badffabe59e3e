"""Ctrl-C at any line of a round: it is repeated, or done, or the rank says that it holds half of it."""

from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist
from interruption import Interruption
from scripted import Scripted, parameters
from selection import INTERRUPTIONS
from sites import error_of, run_ranks
from states import assert_same, snapshot

import loco


def is_torn(optimizer: loco.PulseLoCo) -> bool:
    return "Load the last checkpoint" in error_of(optimizer.state_dict)[1]


def interrupted(rank: int, within: str, every: int, overlap: bool) -> list[tuple[str, bool]]:
    """The last rank is interrupted, once a round, at one line after the other -> where, and whether that left
    it with half of a round."""
    # Who waits for a rank that is torn mostly hears of it; if the store is slow, only once it has waited.
    topology = loco.Topology(repeats=0, patience=10.0)
    store = dist.distributed_c10d._get_default_store()
    options = {"sync_every": 9, "topology": topology, "overlap": overlap}
    clean, hurt = (loco.PulseLoCo(Scripted(parameters(3, 1003), 3, rank), **options) for _ in "ab")
    found: list[tuple[str, bool]] = []
    number, where = 1, "the beginning"
    while where:
        clean.inner.step()
        clean.sync()
        hurt.inner.step()
        interruption = Interruption(number if rank == dist.get_world_size() - 1 else 0, within)
        # In this order: no line of loco that finds its public name is interrupted.
        with suppress(KeyboardInterrupt, loco.LocoError), interruption:
            hurt.sync()
        if is_torn(hurt):
            store.set(f"{number} is torn", "")
        while hurt.round < clean.round and not store.check([f"{number} is torn"]):
            error_of(hurt.sync)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (interruption.where, is_torn(hurt)))
        where, torn = told[-1]
        if torn:
            hurt.load_state_dict(clean.state_dict())
            clean.sync()
            hurt.sync()  # over new links, so that what happens next is heard by those who wait over them
        assert hurt.round == clean.round
        assert_same(snapshot(clean), snapshot(hurt))
        found.append((where, torn))
        number += every
    return found


ROUND_END = (
    r"loco\.round\.(round\.Round\.(vote|commit|learn_verdict|apply|applying|_enter|_call_hooks)"
    r"|loop\.OuterLoop\.run_round|views\.Views\.(run|decide|settle|conversing)"
    r"|outer\.outer_state\.OuterState\.(rewriting|outer_step))$"
)


# What a boundary consists of, and the wait for its round.
BOUNDARY = (
    r"loco\.round\.(overlap\.|round\.Round\.(applying|share|_enter)|outer\.outer_state\.OuterState\.rewriting"
    r"|loop\.OuterLoop\.(run_round|_boundary_done)|inside_site\.share_anchor)"
)


@pytest.mark.check(INTERRUPTIONS, sample=r"the end of a round alone|a boundary alone")
@pytest.mark.parametrize(
    ("world", "within", "every", "overlap"),
    [
        pytest.param(1, ROUND_END, 1, False, id="the end of a round alone"),
        pytest.param(2, ROUND_END, 1, False, id="the end of a round"),
        pytest.param(1, r"loco\.", 1, False, id="every line alone"),
        pytest.param(2, r"loco\.", 37, False, id="every 37th line"),
        pytest.param(1, BOUNDARY, 1, True, id="a boundary alone"),
        pytest.param(2, BOUNDARY, 1, True, id="a boundary"),
    ],
)
def test_ctrl_c_at_any_line_of_a_round_loses_no_bit(
    world: int, within: str, every: int, overlap: bool
) -> None:
    found = run_ranks(world, interrupted, within, every, overlap)[-1]
    assert len(found) > 20
    torn = {where.partition(":")[0] for where, was_torn in found if was_torn}
    # Only while θ, m, e and w are being replaced.
    writers = {f"loco.round.{name}" for name in ("round", "outer.outer_state", "overlap.boundary")}
    writers |= {f"loco.parameters.{name}" for name in ("flat_parameters", "part", "sharding")}
    writers.add("loco.wire.records")  # whose weights the outer step divides by
    writers.add("loco.round.meter")  # that notes when the writing ended
    assert torn <= writers | {name for name in torn if name.startswith("loco.kernels")}
    assert any(was_torn for _, was_torn in found)
