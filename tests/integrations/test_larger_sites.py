"""Sites of two ranks: DDP inside each world, rounds between the ranks of the same number."""

from pathlib import Path
from typing import Any

from claims import resumed, same_bits
from sites import launch_worlds
from test_trainer import trainer_site
from tiny import Told


def check(sites: list[list[Any]]) -> None:
    told: list[Told] = [rank for site in sites for rank in site]
    for each in told[1:]:
        assert same_bits(each.weights, told[0].weights)
    for berlin, paris in zip(*sites, strict=True):
        assert same_bits([berlin.outer["anchor"]], [paris.outer["anchor"]])  # each its half
        for here, there in zip(berlin.reports, paris.reports, strict=True):
            assert here.update_norms == there.update_norms
            assert len(set(here.update_norms)) == 2
            assert here.sent_bytes > 0
    for site in sites:
        assert site[0].steps == site[1].steps  # DDP
        halves = [rank.outer["anchor"].numel() for rank in site]
        assert sum(halves) == sum(w.numel() for w in told[0].weights)


def test_the_trainer_with_ddp_inside_a_site_resumes_bit_for_bit(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = launch_worlds(trainer_site, str(tmp_path), saving, ranks=2)
    check(whole)
    again = launch_worlds(trainer_site, str(tmp_path), saving, "checkpoint-6", ranks=2)
    for site, expected in zip(again, whole, strict=True):
        for rank in (0, 1):
            resumed(site[rank], expected[rank], after=6)
