"""What the wire's benchmark rests on: recordings, noise, plain codes and floors."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from selection import BASELINES
from test_experiments_runs import EASY, PYTHON, run

from experiments.bench.codes import coding
from experiments.bench.codes.floors import floor, half_octave
from experiments.noise import Noise, simulate
from experiments.recording import Recording, middles
from loco import kernels
from loco.kernels import Entries, Gate, Known, OuterStep, reference_tight
from loco.wire.codecs import FAST, TIGHT

EXCERPTS = sorted((Path(__file__).parents[3] / "experiments/results/recorded").glob("*.npz"))
ABOUT = {"sites": 2, "gate": {"dtype": "float16", "gain": 2.0}}


def some_entries(numel: int, density: float, seed: int = 0) -> Entries:
    generator = torch.Generator().manual_seed(seed)
    where = (torch.rand(numel, generator=generator) < density).nonzero().view(-1)
    return Entries.at(where, torch.randn(len(where), generator=generator), numel)


def same(a: Entries, b: Entries) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


@pytest.mark.parametrize("momentum", [True, False], ids=["momentum", "plain"])
def test_a_recording_comes_back_from_its_file(tmp_path: Path, momentum: bool) -> None:
    sites = [some_entries(1003, 0.3), some_entries(1003, 1.0)]
    m = torch.randn(1003) if momentum else None
    sent = Recording(ABOUT, torch.randn(1003), m, sites)
    sent.save(tmp_path / "folder" / "a.npz")
    got = Recording.load(tmp_path / "folder" / "a.npz")
    assert got.about == ABOUT
    assert torch.equal(got.anchor, sent.anchor)
    assert (got.momentum is None) != momentum
    assert got.known.gate == Gate(dtype=torch.float16, gain=2.0)
    assert all(same(a, b) for a, b in zip(got.sites, sites, strict=True))


def test_an_excerpt_holds_the_runs_and_their_entries() -> None:
    whole = Recording(ABOUT, torch.randn(1003), torch.randn(1003), [some_entries(1003, 0.3)])
    runs = [slice(10, 300), slice(700, 701), slice(900, 1003)]
    part = whole.excerpt(runs)
    dense = torch.zeros(1003)
    dense[whole.sites[0].indices()] = whole.sites[0].values
    mine = torch.zeros(394)
    mine[part.sites[0].indices()] = part.sites[0].values
    assert torch.equal(mine, torch.cat([dense[run] for run in runs]))
    assert torch.equal(part.anchor, torch.cat([whole.anchor[run] for run in runs]))


def test_middles_take_the_same_share_of_every_parameter() -> None:
    sizes = [32768, 128, 65536, 1000]
    runs = list(middles(sizes, 20000))
    starts = np.cumsum([0, *sizes])
    for part, size, start in zip(runs, sizes, starts[:-1], strict=True):
        assert start <= part.start <= part.stop <= start + size
        assert (part.stop - part.start) / size == pytest.approx(20000 / sum(sizes), rel=0.1)


def test_the_kept_excerpts_are_of_real_training_and_cost_at_most_2_5_bytes() -> None:
    assert len(EXCERPTS) >= 2
    for path in EXCERPTS:
        assert path.stat().st_size < 1.3e6
        recording = Recording.load(path)
        assert recording.anchor.numel() > 100_000
        assert len(recording.sites) == 4
        for entries in recording.sites:
            assert 0.03 < entries.values.numel() / recording.anchor.numel() < 0.2
            coded = coding.checked(TIGHT, recording.known, entries)
            assert sum(body.raw.numel() for body in coded) < 2.5 * entries.values.numel()


@pytest.mark.check(BASELINES)
def test_record_writes_the_round_after_the_last_step(tmp_path: Path) -> None:
    done = run(
        [*PYTHON, "experiments.record", *EASY, "nproc=2", "excerpt=5000", "name=a"],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    whole = Recording.load(tmp_path / "runs/recorded/a.npz")
    assert whole.about["round"] == 2  # 16 steps, a round every 8
    assert whole.anchor.bfloat16().float().ne(whole.anchor).any()  # round 1 has been applied
    assert len(whole.sites) == 2
    for entries in whole.sites:
        where = entries.indices()
        assert kernels.reference.visible(whole.anchor[where], entries.values, whole.known.gate).all()
    excerpt = Recording.load(tmp_path / "experiments/results/recorded/a.npz")
    assert 4000 < excerpt.anchor.numel() < 6000


@pytest.mark.check(BASELINES)
def test_noise_is_rounds_of_the_library_and_the_same_every_time() -> None:
    noise = Noise(lr=1e-6, numel=3000, rounds=3)
    known, sites = simulate(noise)
    assert known.momentum is not None
    assert len(sites) == 4
    for entries in sites:
        where = entries.indices()
        assert kernels.reference.visible(known.anchor[where], entries.values, Gate()).all()
    # One round more is what these entries do to θ.
    anchor, momentum = known.anchor.clone(), known.momentum.clone()
    outer = OuterStep(num_sites=4, lr=0.7, momentum=0.9, nesterov=True)
    kernels.apply(anchor, momentum, [anchor.clone()], None, sites[0], sites, outer)
    again = simulate(Noise(lr=1e-6, numel=3000, rounds=4)).known
    assert again.momentum is not None
    assert torch.equal(again.anchor, anchor)
    assert torch.equal(again.momentum, momentum)


def test_gap_bytes_say_where_the_entries_are() -> None:
    where = np.array([0, 1, 255, 256, 511, 512, 1023, 5000])
    found, gap = [], -1
    for byte in coding.gap_bytes(where).tolist():
        gap += byte
        if byte < 255:
            found.append(gap := gap + 1)
    assert found == where.tolist()
    assert len(coding.gap_bytes(np.array([], dtype=np.int64))) == 0


def test_half_octaves_are_the_tight_codes_buckets() -> None:
    numbers = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 2**27 - 1, 2**27, 3 * 2**26])
    assert half_octave(numbers).tolist() == [reference_tight.bucket(int(x))[0] for x in numbers]


def test_a_floor_is_the_entropy_of_what_is_known() -> None:
    """All weights alike: the place takes h(p), the side h(1/4), and values of one bucket their plain bits."""
    n, anchor = 4096, torch.full((4096,), 1.0 + 2.0**-8 - 2.0**-20)  # 8 FP32 ulps below its border
    where = torch.arange(0, n, 4)
    ulp = 2.0**-23
    up, down = -(8 + 4 + torch.arange(1024) % 2) * ulp, (2.0**16 - 8 + 4 + torch.arange(1024) % 2) * ulp
    entries = Entries.at(where, torch.where(torch.arange(1024) % 4 == 0, down, up), n)
    found = floor(Known(anchor, None, Gate()), entries, momentum=False)
    entropy = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert found.blind == pytest.approx(n * entropy)
    assert found.place == pytest.approx(n * entropy)
    assert found.sign == pytest.approx(1024 * entropy)
    assert found.value == pytest.approx(1024)  # 4 and 5 are a bucket with one plain bit


def test_what_the_benchmark_codes_has_come_back() -> None:
    known, sites = simulate(Noise(lr=3e-6, numel=2000, rounds=2))
    for codec in (FAST, TIGHT):
        bodies = coding.checked(codec, known, sites[0])
        assert sum(body.entries for body in bodies) == sites[0].values.numel()

    class Wrong(type(FAST)):
        def decode(self, body: torch.Tensor, count: int, known: Known) -> Entries:
            entries = super().decode(body, count, known)
            return entries._replace(values=entries.values + 1)

    with pytest.raises(SystemExit, match="not what was sent"):
        coding.checked(Wrong(), known, sites[0])
