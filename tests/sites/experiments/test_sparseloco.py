"""The SparseLoCo baseline is the published algorithm, and its bytes are packed to the bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from paper import to_bf16
from scripted import Scripted, bits, flat, move
from selection import BASELINES
from sites import error_of, run_ranks
from torch import Tensor, nn

import loco
from experiments.errors import ExperimentError
from experiments.methods.sparseloco import SparseLoCo
from experiments.methods.topk import CHUNK, pack, pack_bits, plan_chunks, quantise, top_k, unpack, unpack_bits
from experiments.settings.config import SparseLoCoConfig

F32 = np.float32
SHAPES = [(70, 130), (9000,), (), (3,), (0, 5), (2, 3, 5), (64, 10)]
IS_BF16 = [False, False, False, False, False, False, True]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
SITES, ROUNDS, SEED = 3, 3, 11
CASES: list[dict[str, Any]] = [
    {},
    {"outer_lr": 0.6, "decay": 0.9, "k": 130},
    {"average": "senders"},
    {"quantiser": "signed", "k": 4096, "outer_lr": 0.8},
]


# The paper's equations, an element at a time. Nothing here is shared with what is tested.


def paper_chunks() -> list[tuple[int, list[int]]]:
    """(tensor, its positions in the flat vector) for each chunk."""
    chunks, start = [], 0
    for tensor, shape in enumerate(SHAPES):
        numel = math.prod(shape)
        if len(shape) == 2:
            rows, columns = shape
            for top in range(0, rows, 64):
                for left in range(0, columns, 64):
                    block = [
                        start + row * columns + column
                        for row in range(top, min(top + 64, rows))
                        for column in range(left, min(left + 64, columns))
                    ]
                    chunks.append((tensor, block))
        else:
            for first in range(0, numel, 4096):
                chunks.append((tensor, [start + i for i in range(first, min(first + 4096, numel))]))
        start += numel
    return chunks


def paper_levels(values: list[float], quantiser: str) -> list[float]:
    """Each value's level; one tensor's values."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((v - mean) ** 2 for v in values)
    step = 1.5 * math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0
    size = math.fsum(abs(v) for v in values) / len(values)
    codes = []
    for v in values:
        if quantiser == "uniform":
            codes.append(min(max(round((v - mean) / (step or 1.0)) + 2, 0), 3))
        else:
            codes.append((v > 0, abs(v) > size))
    level = {}
    for code in set(codes):
        members = [v for v, c in zip(values, codes, strict=True) if c == code]
        level[code] = float(F32(math.fsum(members) / len(members)))
    return [level[code] for code in codes]


def paper_sent(update: np.ndarray, k: int, quantiser: str) -> dict[int, float]:
    """position -> value, of what one site sends."""
    chosen: dict[int, list[int]] = {}
    for tensor, positions in paper_chunks():
        count = max(1, math.floor(len(positions) * k / 4096 + 0.5))
        largest = sorted(positions, key=lambda i: -abs(float(update[i])))[:count]
        chosen.setdefault(tensor, []).extend(largest)
    sent = {}
    for positions in chosen.values():
        values = paper_levels([float(update[i]) for i in positions], quantiser)
        sent |= dict(zip(positions, values, strict=True))
    return sent


def run_paper(case: dict[str, Any]) -> list[list[dict[str, np.ndarray]]]:
    """-> [round][site] θ and e"""
    case = {"outer_lr": 1.0, "decay": 0.95, "k": 64, "average": "sites", "quantiser": "uniform"} | case
    is_bf16 = np.concatenate([np.full(math.prod(s), b) for s, b in zip(SHAPES, IS_BF16, strict=True)])

    def cast(x: np.ndarray) -> np.ndarray:
        return np.where(is_bf16, to_bf16(x), x)

    anchor = flat(parameters(SEED))
    residuals = [first_residual(site) for site in range(SITES)]
    history = []
    for n in range(ROUNDS):
        total, senders = np.zeros_like(anchor), np.zeros(NUMEL, dtype=int)
        for site in range(SITES):
            w = cast(anchor)
            for h in range(2):
                w = cast(w - move(SEED, site, 2 * n + h, NUMEL, 3e-4))
            update = residuals[site] * F32(case["decay"]) + (cast(anchor) - w)
            for i, value in paper_sent(update, case["k"], case["quantiser"]).items():
                update[i] -= F32(value)
                total[i] += F32(value)
                senders[i] += 1
            residuals[site] = update
        divisor = SITES if case["average"] == "sites" else np.maximum(senders, 1)
        anchor = anchor - F32(case["outer_lr"]) * (total / np.asarray(divisor, dtype=F32))
        history.append([{"anchor": anchor, "residual": residuals[site]} for site in range(SITES)])
    return history


def first_residual(site: int) -> np.ndarray:
    """Differences of BF16 weights are often equal, and the equations do not say which of two is sent."""
    return move(SEED, site, 1000, NUMEL, 1e-5)


def parameters(seed: int) -> list[nn.Parameter]:
    rng = np.random.default_rng(seed)
    params = []
    for shape, is_bf16 in zip(SHAPES, IS_BF16, strict=True):
        values = torch.from_numpy(np.asarray(0.02 * rng.standard_normal(shape)))
        values = values.to(torch.bfloat16 if is_bf16 else torch.float32)
        # Stored by columns: positions are those of the logical order.
        params.append(
            nn.Parameter(
                values.t().clone(memory_format=torch.contiguous_format).t()
                if values.dim() == 2
                else values.clone()
            )
        )
    return params


def sparse(
    inner: torch.optim.Optimizer, *, sync_every: int = 8, outer_lr: float = 1.0, **own: Any
) -> SparseLoCo:
    return SparseLoCo(inner, sync_every=sync_every, outer_lr=outer_lr, settings=SparseLoCoConfig(**own))


def run_library(rank: int, case: dict[str, Any], device: str = "cpu") -> list[dict[str, Any]]:
    # Only site 0's initial weights count: the others must receive them.
    params = [nn.Parameter(p.detach().to(device)) for p in parameters(SEED + rank)]
    optimizer = sparse(Scripted(params, SEED, rank, 3e-4), sync_every=2, **case)
    optimizer.residual.copy_(torch.from_numpy(first_residual(rank)))
    handed = spy(optimizer)
    history = []
    for step in range(2 * ROUNDS):
        if step % 2:
            optimizer.inner.step()
            before = optimizer.residual.cpu().clone(), optimizer.anchor.cpu().clone()
            trained = flat(params)
            optimizer.sync()
        else:
            optimizer.step()
            continue
        history.append(
            {
                "anchor": bits(optimizer.anchor.cpu()),
                "residual": bits(optimizer.residual.cpu()),
                "weights": flat(params),
                "before": [x.numpy() for x in before],
                "trained": trained,
                "payload": handed[-1][next(iter(handed[-1]))],
                "handed": sum(message.numel() for message in handed[-1].values()),
                "report": optimizer.last_report,
                "calls": len(handed),
            }
        )
    return history


def spy(optimizer: SparseLoCo) -> list[dict[int, Tensor]]:
    """What the optimizer hands to its transport from now on, a call at a time."""
    handed, swap = [], optimizer._across.swap

    def watched(outgoing: Any, incoming: Any, *, phase: str, limit: float | None = None) -> None:
        handed.append({peer: message.clone() for peer, message in outgoing.items()})
        swap(outgoing, incoming, phase=phase, limit=limit)

    optimizer._across.swap = watched
    return handed


def assert_equal_the_paper(by_site: list[list[dict[str, Any]]], case: dict[str, Any]) -> None:
    """Bit for bit: what is summed in another order is summed in FP64, and rounded to FP32 after that."""
    for n, expected in enumerate(run_paper(case)):
        for site in range(SITES):
            for what in ("anchor", "residual"):
                message = f"round {n}, site {site}, {what}"
                np.testing.assert_array_equal(by_site[site][n][what], bits(expected[site][what]), message)


@pytest.mark.check(BASELINES, sample="case0")
@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_the_papers_equations(case: dict[str, Any]) -> None:
    assert_equal_the_paper(run_ranks(SITES, run_library, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_rounds_on_a_gpu_equal_the_papers_equations(case: dict[str, Any]) -> None:
    assert_equal_the_paper(run_ranks(SITES, run_library, case, "cuda"), case)


def test_after_a_round_all_sites_hold_one_anchor_and_its_cast() -> None:
    by_site = run_ranks(SITES, run_library, {})
    for n in range(ROUNDS):
        first = by_site[0][n]
        for site in range(SITES):
            np.testing.assert_array_equal(by_site[site][n]["anchor"], first["anchor"])
            np.testing.assert_array_equal(by_site[site][n]["weights"], first["weights"])
        anchor = first["anchor"].view(F32)
        np.testing.assert_array_equal(first["weights"][:-640], anchor[:-640])
        np.testing.assert_array_equal(first["weights"][-640:], to_bf16(anchor[-640:]))
    assert len({by_site[site][0]["residual"].tobytes() for site in range(SITES)}) == SITES


def test_what_is_not_sent_stays_in_the_residual() -> None:
    """sent + new e = β·e + Δ: bit for bit where nothing is sent, and to the rounding of e elsewhere."""
    plan = plan_chunks(list(SHAPES), 64, torch.device("cpu"))
    for history in run_ranks(SITES, run_library, {}):
        for n in history:
            indices, codes, levels = unpack(n["payload"], plan)
            sent = np.zeros(NUMEL)
            at = plan.to_flat(indices).numpy()
            sent[at] = levels[plan.tensor_of, codes].numpy()
            residual, anchor = n["before"]
            cast = np.concatenate([anchor[:-640], to_bf16(anchor[-640:])])
            update = residual * F32(0.95) + (cast - n["trained"])
            after = n["residual"].view(F32)
            rest = np.setdiff1d(np.arange(NUMEL), at)
            assert len(at) == len(set(at)) == plan.entries
            np.testing.assert_array_equal(after[rest], update[rest])
            lost = np.abs(sent + after.astype(np.float64) - update.astype(np.float64))
            assert (lost <= np.abs(after) * 2.0**-24).all()
            assert np.abs(sent).max() > 0


def test_a_report_counts_what_was_handed_over() -> None:
    for history in run_ranks(SITES, run_library, {}):
        for n, at in enumerate(history):
            report = at["report"]
            assert at["calls"] == n + 1  # one exchange a round, and no other message
            assert report.sent_bytes == report.received_bytes == at["handed"] == 2 * report.payload_bytes
            assert report.payload_bytes == at["payload"].numel()
            assert (report.round, report.numel, report.site_bytes) == (n + 1, NUMEL, 0)
            assert (report.wire, report.exchange) == ("sparseloco", "gather")
            assert report.density == report.entries / NUMEL
            assert report.dense_bytes == 2 * 2 * 4 * NUMEL // 3
            norm = np.linalg.norm(at["residual"].view(F32).astype(np.float64))
            assert report.residual_norm == pytest.approx(norm, rel=1e-5)  # FP32's sum
            assert set(report.seconds) == {"encode", "exchange", "apply"}


def test_a_payload_has_its_size_to_the_byte() -> None:
    # 256 blocks of 64 entries; 3 bytes for two indices, a byte for four codes, four FP32 levels.
    plan = plan_chunks([(1024, 1024)], 64, torch.device("cpu"))
    assert plan.entries == 16_384
    assert sum(plan.parts) == 24_576 + 4_096 + 16
    assert sum(plan.parts) / 1024**2 == pytest.approx(0.0273, abs=1e-4)
    # Of 5000 elements 64 and 14 are sent, of 3 and of 1 one each: 80 entries of three tensors.
    plan = plan_chunks([(5000,), (3,), (0,), ()], 64, torch.device("cpu"))
    assert [group.k for group in plan.groups] == [64, 14, 1, 1]
    assert sum(plan.parts) == 120 + 20 + 48
    values = torch.randn(5004)
    indices = top_k(values, plan)
    codes, levels = quantise(values[plan.to_flat(indices)], plan.tensor_of, plan.num_tensors, "uniform")
    assert pack(indices, codes, levels).numel() == sum(plan.parts)


def test_packing_keeps_every_index_and_code() -> None:
    everything = torch.arange(CHUNK)[torch.randperm(CHUNK)]
    for count in (0, 1, 2, 3, 5, CHUNK - 1, CHUNK):
        indices, codes = everything[:count], everything[:count] % 4
        assert pack_bits(indices, 12).numel() == math.ceil(count * 12 / 8)
        assert pack_bits(codes, 2).numel() == math.ceil(count * 2 / 8)
        assert torch.equal(unpack_bits(pack_bits(indices, 12), 12, count), indices)
        assert torch.equal(unpack_bits(pack_bits(codes, 2), 2, count), codes)
    assert pack_bits(torch.tensor([0x123, 0xABC, 0xDEF]), 12).tolist() == [0x23, 0xC1, 0xAB, 0xEF, 0x0D]
    assert pack_bits(torch.tensor([1, 2, 3, 0, 2]), 2).tolist() == [0b00111001, 0b10]


def test_chunks_cover_every_element_once() -> None:
    plan = plan_chunks(list(SHAPES), 64, torch.device("cpu"))
    positions = torch.cat([group.positions.reshape(-1) for group in plan.groups])
    assert torch.equal(positions.sort().values, torch.arange(NUMEL))
    assert all(group.positions.shape[1] <= CHUNK for group in plan.groups)


@pytest.mark.parametrize("quantiser", ["uniform", "signed"])
def test_levels_are_the_means_of_their_values(quantiser: str) -> None:
    """Heavy tails, a large mean, one value, and one value many times."""
    rng = np.random.default_rng(3)
    tensors = [
        rng.standard_t(2, 1000),
        5 + rng.standard_normal(63),
        np.array([-2.5]),
        np.full(7, 0.3),
        1e-12 * rng.standard_normal(64),
    ]
    tensors = [values.astype(F32) for values in tensors]
    tensor_of = torch.repeat_interleave(torch.arange(5), torch.tensor([len(v) for v in tensors]))
    codes, levels = quantise(torch.from_numpy(np.concatenate(tensors)), tensor_of, 5, quantiser)
    assert set(codes[:1000].tolist()) == {0, 1, 2, 3}
    got = levels[tensor_of, codes].numpy()
    expected = [paper_levels([float(v) for v in values], quantiser) for values in tensors]
    np.testing.assert_array_equal(got, np.concatenate(expected).astype(F32))


def test_signed_levels_err_less_than_uniform_ones() -> None:
    values = torch.randn(1 << 16)
    plan = plan_chunks([(256, 256)], 64, torch.device("cpu"))
    chosen = values[plan.to_flat(top_k(values, plan))]
    errors = {}
    for quantiser in ("uniform", "signed"):
        codes, levels = quantise(chosen, plan.tensor_of, 1, quantiser)
        errors[quantiser] = float((chosen - levels[0, codes]).norm() / chosen.norm())
    assert errors["signed"] < 0.7 * errors["uniform"] < 0.1


@pytest.mark.check(BASELINES, sample="uniform-nan")
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("quantiser", ["uniform", "signed"])
def test_a_site_that_is_not_finite_stops_all_and_nothing_is_changed(value: float, quantiser: str) -> None:
    for name, text, unchanged, repaired in run_ranks(2, one_site_breaks, value, quantiser):
        assert name == "NonFiniteError"
        assert "site 1" in text
        assert unchanged
        assert repaired == 1


def one_site_breaks(rank: int, value: float, quantiser: str) -> tuple[str, str, bool, int]:
    weight = nn.Parameter(torch.ones(100))
    optimizer = sparse(torch.optim.SGD([weight], lr=0.1), quantiser=quantiser)
    with torch.no_grad():
        weight[7] = value if rank else 0.5
    held = optimizer.anchor.clone(), optimizer.residual.clone(), weight.detach().clone()
    name, text = error_of(optimizer.sync)
    now = optimizer.anchor, optimizer.residual, weight.detach()
    unchanged = all(np.array_equal(bits(a), bits(b)) for a, b in zip(held, now, strict=True))
    with torch.no_grad():
        weight[7] = 0.5
    return name, text, unchanged, optimizer.sync().round


def test_sites_built_differently_are_told() -> None:
    for name, text in run_ranks(2, built_differently):
        assert name == "AgreementError"
        assert "decay" in text


def built_differently(rank: int) -> tuple[str, str]:
    weight = nn.Parameter(torch.ones(3))
    return error_of(lambda: sparse(torch.optim.SGD([weight], lr=0.1), decay=0.9 + 0.05 * rank))


@pytest.mark.usefixtures("single_site")
def test_every_nth_step_runs_a_round() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    inner = torch.optim.SGD([weight], lr=0.5)
    optimizer = SparseLoCo(inner, sync_every=3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.inner is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * torch.arange(64.0).view(8, 8)).sum()
        loss.backward()
        return loss

    rounds = []
    for step in range(7):
        expected = float((weight * torch.arange(64.0).view(8, 8)).sum().detach())
        assert optimizer.step(closure).item() == expected
        rounds.append(optimizer.round)
        if step == 2:
            # One site, α = 1, one of 64 entries a round: the largest moves in full, the others not at all.
            assert weight.detach().view(-1)[:63].eq(1).all()
            assert weight.detach().view(-1)[63] == 1 - 0.5 * 3 * 63
            assert torch.equal(optimizer.residual[:63], 0.5 * 3 * torch.arange(63.0))
            assert optimizer.residual[63] == 0
    assert rounds == [0, 0, 1, 1, 1, 2, 2]
    assert optimizer.last_report is not None
    assert optimizer.last_report.round == 2
    optimizer.sync()
    assert (optimizer.round, optimizer.local_step) == (3, 0)


@pytest.mark.parametrize(
    "wrong", [{"decay": 1.5}, {"k": 0}, {"k": 5000}, {"average": "all"}, {"quantiser": "x"}]
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=f"sparseloco.{next(iter(wrong))}"):
        SparseLoCoConfig(**wrong)


@pytest.mark.check(BASELINES)
@pytest.mark.usefixtures("single_site")
def test_it_learns() -> None:
    """Without a second site, what error feedback defers is all that stands between it and SGD."""
    target = torch.randn(64, 64)
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = SparseLoCo(torch.optim.SGD([weight], lr=0.05), sync_every=1, topology=loco.Topology())
    for _ in range(300):
        optimizer.zero_grad()
        (0.5 * (weight - target).square().sum()).backward()
        optimizer.step()
    assert float((weight.detach() - target).norm() / target.norm()) < 0.2
