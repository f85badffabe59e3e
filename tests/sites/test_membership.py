"""Sites that come and go between two runs: nothing that a site has not sent yet is lost, to the last bit."""

import json
import logging
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted, parameters
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from torch import Tensor

import loco
from loco import kernels
from loco.checkpoints import resize
from loco.checkpoints.rank_manifest import sha256
from loco.checkpoints.resize import Roster, add_exactly, check_vector
from loco.kernels import reference
from loco.round.outer.state import digest_of

NUMEL = 131
Ledger = dict[str, Any]


@pytest.mark.parametrize(
    "found",
    [torch.zeros(7, dtype=torch.float16), torch.zeros(6), torch.zeros(1, 7), torch.zeros(14)[::2], None],
)
def test_kernels_are_given_vectors_of_the_right_kind_only(found: Any) -> None:
    """What another site sends, or a file holds, may be anything."""
    check_vector(torch.zeros(7), 7, "θ")
    with pytest.raises(ValueError, match="θ is no vector of 7 FP32 elements"):
        check_vector(found, 7, "θ")


def another_type_for_who_joins(rank: int, folder: str) -> tuple[str, str]:
    """Site 0's θ arrives as FP16 at a site that joins."""
    inner = Scripted(parameters(3, NUMEL), 3, rank)
    optimizer = loco.PulseLoCo(inner, topology=loco.Topology(repeats=0))
    receive = resize._receive

    def halved(*args: Any) -> Any:
        tree = receive(*args)
        tree["optimizer"]["loco"]["anchor"] = tree["optimizer"]["loco"]["anchor"].half()
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resize, "_receive", halved)
        return error_of(loco.Checkpoints(folder).load, optimizer)


def saved_alone(rank: int, folder: str) -> None:
    optimizer = loco.PulseLoCo(Scripted(parameters(3, NUMEL), 3, rank), topology=loco.Topology(repeats=0))
    optimizer.inner.step()
    optimizer.sync()
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)


def test_who_joins_takes_no_theta_of_another_type(tmp_path: Path) -> None:
    run_ranks(1, saved_alone, str(tmp_path))
    one, other = run_ranks(2, another_type_for_who_joins, str(tmp_path))
    assert other == (
        "ValueError",
        f"state for joining sites: the θ that came is no vector of {NUMEL} FP32 elements",
    )
    assert one[0] == "CheckpointError"


def exact(values: Tensor) -> list[int]:
    """FP32 in units of 2^-149, of which every one is a whole number."""
    return [int(Fraction(float(v)) * 2**149) for v in values]


def plus(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def minus(a: list[int], b: list[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=True)]


def update_now(optimizer: Any) -> Tensor:
    """s = Δ + e of this rank's slice, by the specification."""
    outer = optimizer.outer_state
    with outer.parameters.pieces(outer.start, outer.stop) as weights:
        return reference.encode(outer.anchor, weights, outer.residual, None).entries.values


def life(
    rank: int,
    folders: list[str],
    steps: int,
    script: dict[str, Any],
    load: dict[str, Any] | None,
    empty: bool = False,
) -> Ledger:
    """Resume, train `steps` and save; every FP32 that comes in, goes out or stays is written down."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("loco.checkpoints").addHandler(handler)

    topology = loco.Topology(ranks_per_site=script.get("each", 1), timeout=20, key=script.get("key"))
    inner = Scripted(parameters(3, NUMEL), script["seed"], topology.site, script.get("scale", 3e-5))
    inner.count = script["at"]
    optimizer = loco.PulseLoCo(inner, sync_every=4, topology=topology)
    outer = optimizer.outer_state
    checkpoints = loco.Checkpoints(folders[rank % len(folders)])
    resumed = None if load is None else checkpoints.load(optimizer, **load)
    assert outer.residual is not None
    found: Ledger = {
        "extra": resumed and resumed.extra,
        "position": (optimizer.round, optimizer.local_step),
        "withheld": exact(update_now(optimizer)),
        "weights": [p.detach().clone().numpy() for p in outer.parameters.params],
        "residual": outer.residual.clone().numpy(),
        "anchor": outer.anchor.clone().numpy(),
        "slice": (outer.start, outer.stop),
        "warned": warned,
    }
    brought, sent = [0] * outer.anchor.numel(), [0] * outer.anchor.numel()
    encode = kernels.encode

    def watched(anchor: Tensor, weights: Any, residual: Any, gate: Any, factor: float) -> Any:
        nonlocal brought, sent
        encoded = encode(anchor, weights, residual, gate, factor)
        brought = plus(brought, minus(exact(update_now(optimizer)), exact(residual)))
        whole = torch.zeros_like(anchor)
        whole[encoded.entries.indices()] = encoded.entries.values
        sent = plus(sent, exact(whole))
        return encoded

    kernels.encode = watched
    # What came in inside a round that another life began was counted there.
    found["begun"] = minus(found["withheld"], exact(outer.residual))
    for _ in range(steps):
        optimizer.step()
    kernels.encode = encode
    checkpoints.save(optimizer, {"of": rank}, blocking=True)
    checkpoints.close()
    withheld = exact(update_now(optimizer))
    found |= {
        "brought": plus(brought, minus(withheld, exact(outer.residual))),
        "sent": sent,
        "left": withheld,
        "end": (optimizer.round, optimizer.local_step),
    }
    return found


def total(lives: list[Ledger], name: str) -> list[int]:
    """Over all sites, of the whole vector."""
    sums = [0] * NUMEL
    for one in lives:
        start, stop = one["slice"]
        sums[start:stop] = plus(sums[start:stop], one[name])
    return sums


@pytest.mark.check(CHECKPOINTS, sample=r"11-1")
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("first", [8, 11])  # a round's end; inside a round
def test_nothing_is_lost_when_sites_leave_and_join(tmp_path: Path, each: int, first: int) -> None:
    """4 sites, then 3, then 5 (of 2 ranks: 2, 1, 3): what came in is what was sent and what is held."""
    counts = (4, 3, 5) if each == 1 else (2, 1, 3)
    folders = [str(tmp_path)]
    steps, at, lives = (first, 6, 5), 0, []
    for k, count in enumerate(counts):
        script = {"seed": 7 + k, "at": at, "each": each, "key": bytes(range(32)) if each == 2 else None}
        lives.append(run_ranks(count * each, life, folders, steps[k], script, {} if k else None))
        at += steps[k]
    brought, sent = [0] * NUMEL, [0] * NUMEL
    for k, now in enumerate(lives):
        assert not any(one["warned"] for one in now)
        if k:
            before = lives[k - 1]
            assert {one["position"] for one in now} == {before[0]["end"]}
            assert total(now, "withheld") == total(before, "left")  # bit for bit
            assert any(total(now, "withheld"))
        # What the steps of this life brought; those before it in the round had brought "begun".
        brought = plus(brought, minus(total(now, "brought"), total(now, "begun")))
        sent = plus(sent, total(now, "sent"))
        assert brought == plus(sent, total(now, "left"))
        assert any(sent)
    assert lives[-1][0]["end"] == ((first + 11) // 4, (first + 11) % 4)


@pytest.mark.check(CHECKPOINTS)
def test_who_goes_on_keeps_its_own_and_who_joins_starts_from_the_anchor(tmp_path: Path) -> None:
    """Site 1 leaves, 0, 2 and 3 go on as 0, 1 and 2, and a joining machine has no files."""
    folders = [str(tmp_path / f"{k}") for k in range(4)]
    before = run_ranks(4, life, folders, 11, {"seed": 7, "at": 0}, None)
    shutil.copytree(folders[1], folders[0], dirs_exist_ok=True)  # from the machine that leaves
    moved = [folders[0], folders[2], folders[3], str(tmp_path / "new")]
    load = {"sites": [0, 2, 3, None]}
    now = run_ranks(4, life, moved, 1, {"seed": 8, "at": 11}, load)
    assert [one["extra"] for one in now] == [{"of": k} for k in (0, 2, 3, 0)]
    for new, old in ((1, 2), (2, 3)):
        assert now[new]["withheld"] == before[old]["left"]
    assert total(now[:3], "withheld") == total(before, "left")
    assert not any(now[3]["withheld"])
    for one in now:
        np.testing.assert_array_equal(one["anchor"].view(np.int32), now[0]["anchor"].view(np.int32))
    joined = np.concatenate([w.reshape(-1) for w in now[3]["weights"]])
    np.testing.assert_array_equal(joined, now[3]["anchor"])
    assert not now[3]["residual"].any()
    assert {one["position"] for one in now} == {(2, 3)}


@pytest.mark.check(CHECKPOINTS)
def test_a_leavers_missing_file_is_an_error_that_names_it_unless_it_is_given_up(tmp_path: Path) -> None:
    folders = [str(tmp_path / f"{k}") for k in range(3)]
    before = run_ranks(3, life, folders, 6, {"seed": 7, "at": 0}, None)
    for kind, text in run_ranks(2, refused, folders, {}):
        assert kind == "CheckpointError"
        assert "round-00000001-step-00002/rank-00002 is not visible to any rank" in text
        assert "lost=[2]" in text
    now = run_ranks(2, life, folders, 1, {"seed": 8, "at": 6}, {"lost": [2]})
    assert total(now, "withheld") == total(before[:2], "left")


def refused(rank: int, folders: list[str], load: dict[str, Any], options: Any = None) -> tuple[str, str]:
    options = options or {}
    topology = loco.Topology(ranks_per_site=options.get("each", 1), timeout=20)
    inner = Scripted(parameters(3, NUMEL), 0, rank)
    optimizer = getattr(loco, options.get("kind", "PulseLoCo"))(inner, sync_every=4, topology=topology)
    before = [p.detach().clone() for p in optimizer.outer_state.parameters.params]
    error = error_of(lambda: loco.Checkpoints(folders[rank % len(folders)]).load(optimizer, **load))
    after = optimizer.outer_state.parameters.params
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return error


@pytest.mark.check(CHECKPOINTS)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folders = [str(tmp_path)]
    run_ranks(4, life, folders, 6, {"seed": 7, "at": 0}, None)
    cases: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
        (3, {"sites": [0, 1]}, {}, "for each of 3 sites, got [0, 1]"),
        (3, {"sites": [0, 1, 1]}, {}, "each of the old sites 0 to 3 at most once"),
        (3, {"sites": [0, 1, 4]}, {}, "each of the old sites 0 to 3 at most once"),
        (3, {"sites": [None, 1, 2]}, {}, "site 0 must continue an old site"),
        (3, {"lost": [1]}, {}, "lost must name old sites that leave, which are [3]: got [1]"),
        (4, {}, {"each": 2}, "ranks_per_site = 1, this optimizer has 2"),
    ]
    for world, load, options, sentence in cases:
        for kind, text in run_ranks(world, refused, folders, load, options):
            assert kind == "ValueError"
            assert sentence in text


def test_ranks_that_are_told_different_things_refuse(tmp_path: Path) -> None:
    folders = [str(tmp_path)]
    run_ranks(2, life, folders, 6, {"seed": 7, "at": 0}, None)
    for kind, text in run_ranks(2, told_apart, folders):
        assert kind == "ValueError"
        assert "needs the same arguments on all ranks" in text


def told_apart(rank: int, folders: list[str]) -> tuple[str, str]:
    return refused(rank, folders, {"sites": [rank, 1 - rank]})


def dense(rank: int, folder: str, steps: int, load: bool) -> Any:
    inner = Scripted(parameters(3, NUMEL), 5, rank)
    optimizer = loco.DiLoCo(inner, sync_every=4)
    checkpoints = loco.Checkpoints(folder)
    error = error_of(checkpoints.load, optimizer) if load else None
    position = optimizer.round, optimizer.local_step
    for _ in range(steps):
        optimizer.step()
    if not load:
        checkpoints.save(optimizer, blocking=True)
    checkpoints.close()
    return error, position


@pytest.mark.check(CHECKPOINTS)
def test_without_a_residual_a_site_can_leave_only_at_a_rounds_end(tmp_path: Path) -> None:
    run_ranks(3, dense, str(tmp_path / "inside"), 6, False)
    for (kind, text), _ in run_ranks(2, dense, str(tmp_path / "inside"), 0, True):
        assert kind == "ValueError"
        assert "round 1, step 2 lies inside a round" in text
    run_ranks(3, dense, str(tmp_path / "end"), 8, False)
    for error, position in run_ranks(2, dense, str(tmp_path / "end"), 0, True):
        assert error == ("", "nothing was raised")
        assert position == (2, 0)


def test_what_fits_no_residual_exactly_is_rounded_and_counted(tmp_path: Path) -> None:
    """Sites that step by very different amounts: what one left is far below the other's last bit."""
    folders = [str(tmp_path)]
    run_ranks(2, life, folders, 3, {"seed": 7, "at": 0}, None)
    # The leaver's weights move by a little, the other's residual is huge.
    for rank, scale in ((0, 1.0), (1, 1e-30)):
        path = tmp_path / "round-00000000-step-00003" / f"rank-{rank:05d}"
        tree = torch.load(path / "state.pt", weights_only=True)
        tree["optimizer"]["loco"]["residual"] = torch.full((NUMEL,), scale) / 3
        tree["optimizer"]["loco"]["weights"] = [
            torch.zeros_like(w) for w in tree["optimizer"]["loco"]["weights"]
        ]
        tree["optimizer"]["loco"]["anchor"].zero_()
        rewrite(path, tree)
    (alone,) = run_ranks(1, life, folders, 0, {"seed": 8, "at": 3}, {})
    assert alone["warned"] == [
        f"{NUMEL} elements of what site 1 left fit no residual exactly and were rounded"
    ]
    np.testing.assert_array_equal(alone["residual"], np.full(NUMEL, 1 / 3, dtype=np.float32))


@pytest.mark.check(CHECKPOINTS)
def test_a_leavers_update_that_is_not_finite_is_an_error_on_all_ranks_unless_it_is_given_up(
    tmp_path: Path,
) -> None:
    folders = [str(tmp_path)]
    before = run_ranks(3, life, folders, 6, {"seed": 7, "at": 0}, None)
    path = tmp_path / "round-00000001-step-00002" / "rank-00002"
    tree = torch.load(path / "state.pt", weights_only=True)
    tree["optimizer"]["loco"]["weights"][-1].view(-1)[-1] = torch.nan
    rewrite(path, tree)
    reader, other = run_ranks(2, refused, folders, {})
    sentence = "that site 2 left is infinite or NaN: lost=[2] discards that site's updates"
    assert reader[0] == "ValueError"
    assert other[0] == "CheckpointError"
    assert other[1].startswith("reading round 1, step 2: site 0 failed: the update of ")
    assert reader[1].endswith(sentence)
    assert other[1].endswith(sentence)
    now = run_ranks(2, life, folders, 1, {"seed": 8, "at": 6}, {"lost": [2]})
    assert total(now, "withheld") == total(before[:2], "left")


def rewrite(path: Path, tree: Any) -> None:
    """A rank's data, with a manifest that speaks of them."""
    torch.save(tree, path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    file = path / "state.pt"
    manifest["files"] = {"state.pt": {"bytes": file.stat().st_size, "sha256": sha256(file)}}
    manifest["digest"] = digest_of(tree["optimizer"]["loco"]["anchor"])
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.check(CHECKPOINTS)
def test_only_what_fp32_holds_is_added() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 20_000), dtype=np.uint64).astype(np.uint32)
    a, b = (torch.from_numpy(w.view(np.float32).copy()) for w in words)
    near = torch.from_numpy(rng.integers(-(2**25), 2**25, (2, 20_000)).astype(np.float32) * 2.0**-40)
    for e, x in ((a, b), tuple(near), (a, -a), (a * 0, b), (a, b * 0)):
        keep = e.isfinite() & x.isfinite()
        e, x = e[keep], x[keep]
        residual = e.clone()
        rest = add_exactly(residual, x)
        before = [Fraction(float(p)) + Fraction(float(q)) for p, q in zip(e, x, strict=True)]
        after = [Fraction(float(p)) + Fraction(float(q)) for p, q in zip(residual, rest, strict=True)]
        assert before == after
        with np.errstate(over="ignore"):
            sums = e.numpy() + x.numpy()
        fits = [np.isfinite(t) and Fraction(float(t)) == s for t, s in zip(sums, before, strict=True)]
        assert torch.equal(rest == 0, torch.tensor(fits) | (x == 0))


def test_those_who_leave_are_spread_over_those_who_stay() -> None:
    roster = Roster.of([0, 3, None], [], old_sites=6, new_sites=3, ranks_per_site=2)
    assert roster.leaving == (1, 2, 4, 5)
    assert [roster.heirs(k) for k in roster.leaving] == [[0, 1, 2], [1, 0, 2], [0, 1, 2], [1, 0, 2]]
    assert [roster.old_rank(r) for r in range(6)] == [0, 1, 6, 7, None, None]
    assert Roster.of(None, [4], old_sites=5, new_sites=3, ranks_per_site=1).leaving == (3,)
