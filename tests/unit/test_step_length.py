"""An outer step that finds its own length."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import step_length as specification
import torch
from scripted import Scripted, parameters

import loco
from loco.kernels import BLOCK, Entries
from loco.round.outer import step_length
from loco.round.outer.step_length import Agreement, StepLength


def sparse(vector: torch.Tensor) -> Entries:
    where = vector.nonzero().flatten()
    return Entries.at(where, vector[where], vector.numel())


def sent_at(round: int, numel: int, *, undone: bool) -> torch.Tensor:
    """A third of the elements, each in the direction of earlier rounds, or against those before the last."""
    rng = np.random.default_rng(round)
    values = rng.random(numel, dtype=np.float32) * (1e-3 if not undone or round % 4 < 2 else -1e-3)
    return torch.from_numpy(np.where(rng.random(numel) < 1 / 3, values, np.float32(0)))


@pytest.mark.parametrize("undone", [False, True])
def test_it_is_the_specifications_and_follows_whether_rounds_undo_each_other(undone: bool) -> None:
    numel = 1000
    theta = torch.ones(numel)
    length, paper, found = StepLength.of(numel), specification.StepLength(), []
    for round in range(40):
        parts = [sent_at(round, numel, undone=undone), sent_at(round + 400, numel, undone=undone)]
        parts[1][parts[0] == 0] = 0.0
        length = length.moved(length.agreement)
        length = length.having_seen([sparse(part) for part in parts], 2.0, theta)
        alpha = paper.of_round(((parts[0] + parts[1]) / 2).numpy(), theta.numpy())
        assert length.eighths == paper.eighths
        assert np.float32(length.outer_lr) == np.float32(alpha)
        found.append(length.outer_lr)
    assert found[0] == 1.0
    assert found[-1] < 1 if undone else found[-1] > 20
    step = found[-1] * math.sqrt(length.agreement.whole)
    assert step <= 0.025 * float(theta.norm())  # rounds that agree would go on, but for this


def test_all_elements_are_the_same_as_entries_of_all() -> None:
    g, theta = torch.randn(2 * BLOCK + 9), torch.ones(2 * BLOCK + 9)
    fresh = StepLength.of(g.numel())
    as_entries = fresh.having_seen([Entries.at(torch.arange(g.numel()), g, g.numel())], 1.0, theta)
    as_vector = StepLength.of(g.numel()).having_seen([Entries.whole(g)], 1.0, theta)
    assert as_entries.agreement == as_vector.agreement
    assert torch.equal(as_entries.before, as_vector.before)


def test_of_a_large_vector_every_so_many_blocks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_length, "_LOOKED_AT", 3 * BLOCK)
    g = sent_at(1, 7 * BLOCK + 30, undone=False)  # every third block: 0, 3 and 6
    theta = torch.arange(g.numel()).float()
    looked_at = [slice(k * BLOCK, (k + 1) * BLOCK) for k in (0, 3, 6)]
    for entries in (sparse(g), Entries.whole(g)):
        length = StepLength.of(g.numel()).having_seen([entries], 1.0, theta)
        assert torch.equal(length.before[0], torch.cat([g[at] for at in looked_at]))
        squares = [int(x) ** 2 for at in looked_at for x in theta[at]]
        assert length.agreement.anchor == sum(squares)  # whole numbers, which doubles hold exactly


def test_what_ranks_of_a_site_have_seen_adds_up() -> None:
    parts = [Agreement(1.0, 2.0, 4.0, 8.0, 9.0, 100.0), Agreement(-3.0, 5.0, 12.0, 1.0, 7.0, 21.0)]
    joined = Agreement.joined(parts)
    assert joined == (-2.0, 7.0, 16.0, 9.0, 16.0, 121.0)
    assert joined.cosine == -2 / 12 + 0.06  # which is less than 7 / 16
    assert joined._replace(last=12.0).cosine == 7 / 16
    assert joined._replace(whole_last=0.0).cosine == 7 / 16


@pytest.mark.parametrize("eighths", [-3, 0, 40])
def test_a_round_that_sends_nothing_changes_nothing(eighths: int) -> None:
    before = replace(StepLength.of(1), eighths=eighths)
    for found in (Agreement(), Agreement(whole_last=2.0, whole_earlier=3.0, anchor=1.0)):
        assert before.moved(found).eighths == eighths


def test_what_was_sent_long_ago_fades_to_nothing() -> None:
    length, theta, smallest = StepLength.of(300), torch.ones(300), []
    for round in range(300):
        g = sent_at(0, 300, undone=False) if round < 2 else torch.zeros(300)
        length = length.moved(length.agreement).having_seen([sparse(g)], 1.0, theta)
        left = length.before[1][length.before[1] != 0].abs()
        smallest.append(float(left.min()) if left.numel() else 1.0)
    assert not length.before.any()
    assert min(smallest) >= 2.0**-120 > torch.finfo(torch.float32).smallest_normal
    tiny = Agreement(last=1e-90, earlier=1e-208, whole=1e-90, whole_last=1e-90, whole_earlier=5e-324)
    assert tiny.cosine == pytest.approx(1e-208 / 1e-45 / 5e-324**0.5)


@pytest.mark.parametrize(("size", "then"), [(3e-5, 3.125e-4 / 3e-5), (3e-4, 1), (4e-3, 1), (8e-3, 0.625)])
def test_before_anything_can_be_compared_its_length_is_a_share_of_the_weights(
    size: float, then: float
) -> None:
    """As long as α·|g| ≤ |θ|/3200 allows, and at least 1, but for the limit of |θ|/200."""
    agreement = Agreement(whole=size**2, anchor=1.0)
    for eighths in (0, 40):
        first = replace(StepLength.of(1), eighths=eighths).moved(agreement)
        assert then / 2 ** (1 / 8) < first.outer_lr <= then
        assert (first.held, first.compared, first.turned) == (0, False, False)


@pytest.mark.parametrize(("size", "then"), [(3e-5, 40), (1e-2, -8)])
def test_where_what_it_was_compared_with_is_lost_it_stays(size: float, then: int) -> None:
    length = replace(StepLength.of(1), eighths=40, compared=True)
    assert length.moved(Agreement(whole=size**2, anchor=1.0)).eighths == then


@pytest.mark.parametrize(
    "damage",
    [
        {"eighths": 1.5},
        {"eighths": 1000},
        {"held": -1},
        {"held": 23},
        {"agreement": [1.0]},
        {"agreement": [float("nan")] * 6},
        {"agreement": [1.0, 1.0, -1.0, 1.0, 1.0, 1.0]},
        {"eighths": 10**6, "before": None},
        {"before": torch.full((2, 10), float("nan"))},
        {"before": torch.zeros(10)},
        {"before": "x"},
        {"before": torch.zeros(2, 10, dtype=torch.float64)},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    whole = StepLength.of(10).state()
    assert StepLength.from_state(whole, 10).eighths == 0
    with pytest.raises(ValueError, match="does not say how long the outer step is: it is damaged"):
        StepLength.from_state(whole | damage, 10)
    with pytest.raises(ValueError, match="does not say how long the outer step is: it is damaged"):
        StepLength.from_state(None, 10)


def test_a_step_that_finds_its_length_has_no_momentum(single_site: Any) -> None:
    def build(**options: Any) -> loco.PulseLoCo:
        return loco.PulseLoCo(Scripted(parameters(0, 300), 0, 0), **options)

    assert build(saving=0.25).outer_state.outer_lr == 1.0
    with pytest.raises(
        ValueError, match=r"has no momentum, .* leave out outer_momentum \(got 0.9\), or give outer"
    ):
        build(saving=0.25, outer_momentum=0.9)
    state = build(saving=0).outer_state
    assert (state.outer_lr, state.step_length) == (7.0, None)


def test_weights_from_outside_begin_anew(single_site: Any) -> None:
    optimizer = loco.PulseLoCo(Scripted(parameters(0, 300), 0, 0), sync_every=1, saving=0.0625)
    for _ in range(6):
        optimizer.step()
    state = optimizer.outer_state
    assert state.outer_lr != 1
    assert optimizer.last_report is not None
    assert optimizer.last_report.outer_lr == state.outer_lr
    optimizer.adopt_weights()
    assert state.outer_lr == 1.0
    assert state.step_length is not None
    assert not state.step_length.before.any()


def test_it_begins_with_plain_averaging() -> None:
    length, theta, found = StepLength.of(300), torch.ones(300), []
    nothing, update = torch.zeros(300), torch.full((300,), 0.0001)
    for g in (nothing, nothing, update, update / 2, update, update, nothing, 10 * update, nothing):
        length = length.moved(length.agreement).having_seen([sparse(g)], 1.0, theta)
        found.append(length.eighths)
    assert found[:3] == [0, 0, 0]
    assert found[3:5] == [13, 21]  # 2^(13/8) · 0.0001 ≤ 1/3200
    assert found[5:8] == [29, 37, 37]
    assert found[8] == 18  # 2^(18/8) · 0.001 ≤ 1/200


def test_the_limit_is_raised_where_it_alone_keeps_rounds_that_agree_from_growing() -> None:
    length = StepLength.of(1)
    agreed = Agreement(whole=1e-4, whole_last=1e-4, whole_earlier=1e-4, anchor=1.0)
    for cosine, held in ((0.1, 1), (0.009, 1), *((0.1, k) for k in range(2, 23)), (0.1, 22)):
        length = length.moved(agreed._replace(last=1e-4, earlier=cosine * 1e-4))
        assert length.held == held
        longest = 0.005 * 2 ** (max(0, held - 7) / 8) if held < 22 else 0.02
        assert length.outer_lr * 0.01 <= longest * (1 + 1e-9)
    assert length.outer_lr * 0.01 > 0.018


def test_where_rounds_have_undone_each_other_it_grows_slowly() -> None:
    length = replace(StepLength.of(1), eighths=40)
    agreed = Agreement(whole=1e-9, whole_last=1e-9, whole_earlier=1e-9, anchor=1.0)
    changes = []
    for cosine in (0.5, 0.1, 0.035, -0.01, 0.1, -0.02, 0.1, 0.001, -0.2):
        before, length = length.eighths, length.moved(agreed._replace(last=1e-9, earlier=cosine * 1e-9))
        changes.append(length.eighths - before)
    assert changes == [8, 4, 2, -1, 4, -2, 1, 0, -8]  # α·|g| is a fifth of the limit at the start


@pytest.mark.parametrize("begins_as", [0.0, 1e-3])
def test_weights_that_begin_as_zeros_set_no_limit(begins_as: float) -> None:
    length, theta = StepLength.of(300), torch.full((300,), begins_as)
    for _ in range(8):
        seen = sent_at(0, 300, undone=False)
        length = length.moved(length.agreement).having_seen([sparse(seen)], 1.0, theta)
        theta = theta - length.outer_lr * seen
    assert (length.eighths == 36) == (begins_as == 0)


def test_what_is_kept_is_fp32_in_host_memory_whatever_torchs_defaults_are() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            before = StepLength.of(300).before
    finally:
        torch.set_default_dtype(torch.float32)
    assert (before.dtype, before.device.type) == (torch.float32, "cpu")
