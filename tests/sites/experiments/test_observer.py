"""What is seen of the gate, followed by hand, and that looking changes nothing."""

from typing import Any

import pytest
import torch
from sites import run_ranks
from states import Snapshot, assert_same, small_model, snapshot, train

import loco
from experiments.methods.observer import Observer

# θ starts at 1 everywhere, where BF16 casts change from 2^-9 downwards, that itself not included.
BIG, SMALL, LESS, TIE = 2.0**-4, 2.0**-12, 2.0**-13, 2.0**-9
MOVES = [  # [round][site][element], what the site's inner steps take off its weights
    [[0.5, BIG, SMALL, 0, 0], [0.5, 0, SMALL, 0, 0]],
    [[0, 0, 0, 0, LESS], [0, 0, 0, 0.25, 0]],
    [[0, 0, TIE, 0, 0], [0, 0, 0, 0, 0]],  # its cast stays, but with the residual it is seen
]
UNIONS = [2 / 5, 1 / 5, 1 / 5]
VISIBLE = [[2 / 5, 1 / 5], [0, 1 / 5], [0, 0]]  # [round][site]
# By site 0: third element withheld for 1, 2, then sent; the fifth, half as large, from the second round on.
AGES = [[1, 1], [(2 * 2 + 1 * 1) / 3, 2], [2, 3]]


class Moves(torch.optim.Optimizer):
    """Takes a round's move off in as many equal steps as a round has."""

    def __init__(self, params: Any, site: int, steps: int) -> None:
        super().__init__(params, {"lr": 1.0})
        self._site, self._steps, self._count = site, steps, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        move = torch.tensor(MOVES[self._count // self._steps][self._site]) / self._steps
        start = 0
        for p in self.param_groups[0]["params"]:
            p.sub_(move[start : start + p.numel()])
            start += p.numel()
        self._count += 1


def watched(rank: int, steps: int, ranks_per_site: int) -> list[dict[str, float]]:
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = loco.PulseLoCo(
        Moves(params, rank // ranks_per_site, steps),
        sync_every=steps,
        outer_lr=1.0,
        outer_momentum=0.0,
        topology=loco.Topology(ranks_per_site=ranks_per_site),
    )
    observer = Observer(optimizer)
    seen = []
    for step in range(3 * steps):
        optimizer.step()
        if (step + 1) % steps == 0:
            seen.append(observer.after_round())
    return seen


@pytest.mark.parametrize("steps", [1, 4])
def test_two_sites_are_seen_as_they_are_followed_by_hand(steps: int) -> None:
    for site, rounds in enumerate(run_ranks(2, watched, steps, 1)):
        for round, seen in enumerate(rounds):
            assert seen == {
                "union_density": UNIONS[round],
                "visible": pytest.approx(VISIBLE[round][site]),
                "age": pytest.approx(AGES[round][site]),
            }


def test_a_union_is_the_whole_models_also_where_a_sites_ranks_watch_slices() -> None:
    for rounds in run_ranks(4, watched, 1, 2):
        assert [seen["union_density"] for seen in rounds] == UNIONS


def with_and_without(rank: int, options: dict[str, Any]) -> tuple[Snapshot, Snapshot, list[float]]:
    states, densities = [], []
    for looking in (False, True):
        net = small_model()
        inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
        optimizer = loco.PulseLoCo(inner, sync_every=3, **options)
        observer = Observer(optimizer) if looking else None
        for step in range(12):
            train(net, optimizer, rank, range(step, step + 1))
            if observer and step % 3 == 2:
                observer.after_round()
                assert optimizer.last_report is not None
                densities.append(optimizer.last_report.density)
        states.append(snapshot(optimizer))
    return states[0], states[1], densities


@pytest.mark.parametrize("options", [{}, {"gate_margin": 0.25, "value_steps": 16}], ids=["exact", "stepped"])
def test_being_watched_changes_no_bit_of_training(options: dict[str, Any]) -> None:
    for unseen, seen, densities in run_ranks(2, with_and_without, options):
        assert_same(unseen, seen)
        assert all(0 < density < 1 for density in densities)
