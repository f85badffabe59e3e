"""What the wire's benchmark rests on: recordings, noise, and codecs whose bytes have come back."""

from pathlib import Path

import pytest
import torch
from selection import BASELINES, COMMANDS

from experiments.bench import wire
from experiments.bench.measuring import read
from experiments.noise import simulate
from loco import kernels
from loco.kernels import Entries, Gate, Known, OuterStep
from loco.wire.codecs import FAST, TIGHT


def test_recorded_rounds_are_of_real_training_and_cost_at_most_2_6_bytes_an_entry() -> None:
    found = [wire.recorded(path) for path in sorted(wire.RECORDED.glob("*.npz"))]
    assert [lr for lr, _ in found] == [1e-6, 3e-6, 3e-6]
    for _, (known, sites) in found:
        assert known.anchor.bfloat16().float().ne(known.anchor).any()  # rounds have been applied
        assert len(sites) == 4
        for entries in sites:
            assert 0.03 < entries.values.numel() / known.numel < 0.2
            where = entries.indices()
            assert kernels.reference.visible(known.anchor[where], entries.values, known.gate).all()
            coded = wire.checked(TIGHT, known, entries)
            assert sum(body.raw.numel() for body in coded) < 2.6 * entries.values.numel()


@pytest.mark.check(BASELINES)
def test_noise_is_rounds_of_the_library_and_the_same_every_time() -> None:
    known, sites = simulate(3000, 1e-6, rounds=3)
    assert known.momentum is not None
    assert len(sites) == 4
    for entries in sites:
        where = entries.indices()
        assert kernels.reference.visible(known.anchor[where], entries.values, Gate()).all()
    # One round more is what these entries do to θ.
    anchor, momentum = known.anchor.clone(), known.momentum.clone()
    outer = OuterStep(divisor=4, lr=0.7, momentum=0.9, nesterov=True)
    kernels.apply(anchor, momentum, [anchor.clone()], None, sites[0], sites, outer)
    again = simulate(3000, 1e-6, rounds=4).known
    assert again.momentum is not None
    assert torch.equal(again.anchor, anchor)
    assert torch.equal(again.momentum, momentum)


def test_what_the_benchmark_codes_has_come_back() -> None:
    known, sites = simulate(2000, 3e-6, rounds=2)
    for codec in (FAST, TIGHT):
        bodies = wire.checked(codec, known, sites[0])
        assert sum(body.entries for body in bodies) == sites[0].values.numel()

    class Wrong(type(FAST)):
        def decode(self, body: torch.Tensor, count: int, known: Known) -> Entries:
            entries = super().decode(body, count, known)
            return entries._replace(values=entries.values + 1)

    with pytest.raises(SystemExit, match="not what was sent"):
        wire.checked(Wrong(), known, sites[0])


@pytest.mark.check(COMMANDS)
def test_a_row_for_each_codec_and_a_plot(tmp_path: Path) -> None:
    wire.main(["--quick", "--repeats", "1", "--out", str(tmp_path)])
    rows = read(tmp_path / "wire.csv")
    each = {
        row["by"]: row["bytes_per_entry"] for row in rows if (row["data"], row["of"]) == ("noise", "entries")
    }
    assert 2 < each["tight"] < 2.6 < 5 < each["fast"] < 5.2
    timed = {row["by"] for row in rows if row["of"] == "speed" and row["encode_p50"] > 0}
    assert {"fast", "tight", wire.ONE_PIECE} <= timed
    assert (tmp_path / "wire.png").exists()
