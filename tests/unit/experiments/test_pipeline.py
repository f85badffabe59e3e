"""The pipeline's parts, without Ray: losses, sampling while weights change, and who may have what."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import NobodysController
from torch import Tensor

import loco
from experiments.config import TransformerConfig
from experiments.errors import ExperimentError
from experiments.merging import load
from experiments.model import ByteTransformer
from experiments.pipeline.compare import COLUMNS, PipelineCompareConfig, runs_of, table
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.controller import Controller
from experiments.pipeline.curves import Curves
from experiments.pipeline.diary import Diary, Notes
from experiments.pipeline.engine import TorchEngine, whole
from experiments.pipeline.figures import draw, figures
from experiments.pipeline.losses import CORRECTIONS, losses_of
from experiments.pipeline.publishing import Publishing
from experiments.pipeline.report import page
from experiments.pipeline.samples import Group, Parcel, groups_of
from experiments.tasks.rollout import Rollout, Weights, sample

LIMITS: dict[str, float] = {"ratio_limit": 4.0, "clip_low": 0.2, "clip_high": 0.28}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8]]


def gradient(correction: str, logp: Sequence[float], old: Sequence[float], advantage: Tensor) -> Tensor:
    now = torch.tensor(logp, requires_grad=True)
    losses_of(correction, now, torch.tensor(old), advantage, **LIMITS).sum().backward()
    assert now.grad is not None
    return now.grad


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_samples_of_todays_weights_have_the_policy_gradient(correction: str) -> None:
    advantage = torch.tensor([1.5, -0.5])
    assert torch.equal(gradient(correction, [-1.0, -2.0], [-1.0, -2.0], advantage), -advantage)


def test_aipo_weighs_a_token_by_its_ratio_up_to_a_limit() -> None:
    ratios = torch.tensor([0.5, 2.0, 100.0])
    found = gradient("aipo", (ratios.log() - 5).tolist(), [-5.0] * 3, torch.ones(3))
    torch.testing.assert_close(found, torch.tensor([-0.5, -2.0, -4.0]))


def model_of(seed: int) -> ByteTransformer:
    return ByteTransformer(TransformerConfig(dim=16, layers=2, heads=2, context=16), seed=seed)


def sampled(model: ByteTransformer, before_token: Callable[[], Weights] | None = None) -> Rollout:
    uniforms = torch.rand(len(PROMPTS) * 2, 6, generator=torch.Generator().manual_seed(1))
    cpu = torch.device("cpu")
    return sample(
        model, PROMPTS, group=2, longest=6, uniforms=uniforms, device=cpu, before_token=before_token
    )


def in_turn(model: ByteTransformer, *, recompute: bool) -> tuple[Rollout, list[dict[str, Tensor]]]:
    """Before each token other weights -> and these, by version."""
    given: list[dict[str, Tensor]] = []

    def before_token() -> Weights:
        weights = model_of(len(given)).state_dict()
        model.load_state_dict(weights)
        given.append(weights)
        return Weights(len(given) - 1, recompute)

    return sampled(model, before_token), given


def logp_by(weights: dict[str, Tensor], row: Tensor, place: int) -> float:
    model = model_of(0)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(row[None, :place])[0, -1]
    return float(logits.log_softmax(dim=-1)[row[place]])


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    plain, watched = sampled(model_of(0)), sampled(model_of(0), lambda: Weights(7, False))
    assert plain.texts == watched.texts
    assert all(torch.equal(a, b) for a, b in zip(plain.logp, watched.logp, strict=True))
    assert not plain.versions
    assert all((versions == 7).all() for versions in watched.versions)
    assert [len(versions) for versions in watched.versions] == [len(logp) for logp in plain.logp]


def test_each_token_has_the_probability_that_its_version_gives_it() -> None:
    """With the cache made anew, all that a token depends on is of one version."""
    rollout, given = in_turn(model_of(0), recompute=True)
    checked = 0
    for row, logp, versions in zip(rollout.tokens, rollout.logp, rollout.versions, strict=True):
        head = len(row) - len(logp)
        for place, (found, version) in enumerate(zip(logp.tolist(), versions.tolist(), strict=True)):
            # The cache sums in another order than one pass over all tokens does.
            assert found == pytest.approx(logp_by(given[version], row, head + place), abs=1e-5)
            checked += 1
    assert checked > 12


def test_a_cache_that_is_kept_remembers_older_weights() -> None:
    kept, given = in_turn(model_of(0), recompute=False)
    row, logp, version = kept.tokens[0], kept.logp[0], int(kept.versions[0][-1])
    head = len(row) - len(logp)
    assert abs(float(logp[-1]) - logp_by(given[version], row, head + len(logp) - 1)) > 1e-3


def test_groups_travel_whole() -> None:
    rollout, _ = in_turn(model_of(0), recompute=True)
    groups = groups_of(rollout, torch.tensor([1.0, 0, 0, 0, 1, 1]), 2)
    assert len(groups) == 3
    for k, group in enumerate(groups):
        again = Group.unpacked(group.packed())
        assert group.head.tolist() == PROMPTS[k]
        for i, row in enumerate(again.rows()):
            assert torch.equal(row, rollout.tokens[2 * k + i])
            assert torch.equal(again.split(again.logp)[i], rollout.logp[2 * k + i])
            assert torch.equal(again.split(again.versions)[i], rollout.versions[2 * k + i])
        assert again.advantage.tolist() == group.advantage.tolist()
    assert groups[0].advantage[0] > 0 > groups[0].advantage[1]
    assert not groups[1].advantage.any()


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:7], lambda b: b"", lambda b: b + bytes(4)])
def test_what_is_no_group_is_refused(damage: Callable[[bytes], bytes]) -> None:
    rollout, _ = in_turn(model_of(0), recompute=True)
    packed = groups_of(rollout, torch.zeros(6), 2)[0].packed()
    with pytest.raises(ValueError, match="are not a group"):
        Group.unpacked(damage(packed))


# Rounds of 2 steps, 2 sites and 2 prompts: 8 prompts a round, 4 rounds.
SMALL = ["steps=8", "sync_every=2", "eval_every=8", "arithmetic.prompts=2", "lease=4"]


def config_of(*more: str) -> PipelineConfig:
    return load(PipelineConfig, [*SMALL, *more])


async def leased(controller: Controller, worker: str) -> list[int] | None:
    """The tickets of a lease; None if the worker would have to wait."""
    try:
        lease = await asyncio.wait_for(controller.lease(worker), 0.05)
    except TimeoutError:
        return None
    return [] if lease is None else lease.tickets


async def answered(controller: Controller, worker: str, version: int) -> list[int] | None:
    try:
        lease = await asyncio.wait_for(controller.lease(worker), 0.05)
    except TimeoutError:
        return None
    assert lease is not None
    parcels = [
        Parcel(t, oldest=version, tokens=3, longest=1, reward=1.0, group=bytes([t])) for t in lease.tickets
    ]
    await controller.give(worker, lease, parcels)
    return lease.tickets


async def taken(controller: Controller, version: int, count: int = 2) -> list[int] | None:
    try:
        found = await asyncio.wait_for(controller.take("site 0", version, count), 0.05)
    except TimeoutError:
        return None
    return None if found is None else [group[0] for group in found]


def test_without_staleness_training_and_sampling_take_turns() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        assert await answered(controller, "a", 1) is None  # nothing is published
        await controller.published(1)
        assert await answered(controller, "a", 1) == [0, 1, 2, 3]
        assert await answered(controller, "b", 1) == [4, 5, 6, 7]
        assert await answered(controller, "a", 1) is None
        assert [await taken(controller, 1) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert await answered(controller, "a", 1) is None  # the round is not done
        assert await taken(controller, 1) is None
        await controller.published(2)
        assert await answered(controller, "a", 2) == [8, 9, 10, 11]

    asyncio.run(play())


def test_a_lease_says_which_weights_will_not_be_too_old() -> None:
    """Weights of version v may answer what rounds v … v + max_staleness learn from."""

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1", "lease=6"))
        await controller.published(1)
        leases = [await controller.lease(worker) for worker in "abc"]
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(5, 1), (11, 1), (15, 1)]
        controller = Controller(config_of("max_staleness=0", "lease=6"))
        await controller.published(3)
        leases = [await controller.lease(worker) for worker in "ab"]
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(21, 3), (23, 3)]
        controller = Controller(config_of("max_staleness=1", "lease=6"))
        await controller.published(2)
        leases = [await controller.lease(worker) for worker in "abc"]
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(13, 1), (19, 2), (23, 2)]

    asyncio.run(play())


def test_workers_are_ahead_by_so_many_versions_and_never_behind_the_end() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=2"))
        await controller.published(1)
        for _ in range(6):
            assert await answered(controller, "a", 1)
        assert await answered(controller, "a", 1) is None  # 24 = 3 rounds
        for version in (1, 2, 3):
            await controller.published(version)
            for _ in range(4):
                assert await taken(controller, version)
        await controller.published(4)
        assert await answered(controller, "a", 4)
        assert await answered(controller, "a", 4)
        assert await answered(controller, "a", 4) is None  # all 32 are there

    asyncio.run(play())


def test_what_is_too_old_is_dropped_and_asked_for_anew() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        await answered(controller, "a", 1)
        await answered(controller, "a", 0)  # a version that the worker should not have had
        assert [await taken(controller, 1) for _ in range(3)] == [[0, 1], [2, 3], None]
        assert await answered(controller, "b", 1) == [8, 9, 10, 11]
        assert await taken(controller, 1) == [8, 9]
        counts = (await controller.look())["notes"].counts
        assert counts["groups dropped, too old"] == 4
        assert counts["tokens dropped, too old"] == 12

    asyncio.run(play())


def test_what_a_lost_worker_had_is_given_to_the_next_one_and_counts_once() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        before = await controller.lease("a")
        assert before is not None
        assert await leased(controller, "b") == [4, 5, 6, 7]
        assert await leased(controller, "c") is None
        assert await leased(controller, "a") == before.tickets  # it was started again
        late = [Parcel(t, oldest=1, tokens=1, longest=1, reward=0.0, group=b"x") for t in before.tickets]
        await controller.give("a", before, late)  # from before it was lost
        assert await taken(controller, 1) is None

    asyncio.run(play())


def test_a_controller_that_was_lost_learns_from_a_trainer_where_it_is() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        assert await taken(controller, 3) is None
        assert await answered(controller, "a", 3) == [16, 17, 18, 19]
        assert await taken(controller, 3) == [16, 17]

    asyncio.run(play())


def test_a_worker_that_waits_is_told_of_the_end() -> None:
    async def play() -> None:
        controller = Controller(config_of())
        waiting = asyncio.create_task(controller.lease("a"))
        await asyncio.sleep(0)
        await controller.end()
        assert await waiting is None

    asyncio.run(play())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["workers=0"], "workers must be at least 1, got 0"),
        (["max_staleness=-1"], "max_staleness must be at least 0, got -1"),
        (["correction=apio"], "unknown correction 'apio'; did you mean 'aipo'?"),
        (["task=text"], "task=text has no verifier, which a pipeline needs: use arithmetic or gym"),
        (["method=ddp"], "sites train by method=pulseloco or diloco, got method=ddp"),
        (["ranks_per_site=2"], "sites of several ranks stay the same"),
        (["ratio_limit=0.5"], "ratio_limit must be at least 1, got 0.5"),
        (["stalenes=1"], "unknown key 'stalenes'; did you mean"),
        (["engine=vlm"], "unknown engine 'vlm'; did you mean 'vllm'?"),
        (["engine=vllm"], "vLLM loads models of Hugging Face's format: engine=vllm needs model=hf"),
        (["vllm.max_model_len=9"], "vllm.* are options of vLLM: set engine=vllm, too"),
        (["address=10.0.0.1:6379"], "the parts of a cluster may not see this machine's folders"),
        (["sites_on=[a]"], "sites_on and workers_on are nodes of a cluster, which address=HOST:PORT joins"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        config_of(*arguments)
    assert str(raised.value).startswith(sentence)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["address=127.0.0.1:{port}"], "no Ray cluster answers at 127.0.0.1:{port} (.*): start one with "),
        (["address=somewhere"], "address must be HOST:PORT of a Ray cluster, got somewhere"),
        (["engine=vllm", "model=hf", "path=x"], "engine=vllm needs vllm in this environment"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence_at_once(arguments: list[str], sentence: str) -> None:
    pytest.importorskip("ray", reason="needs ray")
    from experiments.pipeline import cluster

    port = free_port()
    config = config_of("weights=/shared", *(text.format(port=port) for text in arguments))
    begun = time.monotonic()
    with pytest.raises(ExperimentError, match=sentence.format(port=port)), cluster.started(config, 3):
        pass
    assert time.monotonic() - begun < 60  # Ray itself would give up after two minutes


def test_shares_are_of_the_time_between_the_first_version_and_the_last_round() -> None:
    notes = Notes()

    def noted(part: str, what: str, begun: float, ended: float, **about: Any) -> None:
        notes.events.append({"part": part, "what": what, "from": begun, "to": ended} | about)

    noted("worker 0", "waiting", 0, 12)
    noted("worker 0", "sampling", 12, 17)
    noted("worker 0", "waiting", 17, 30)
    noted("site 0, store", "writing", 9, 10, version=1)
    noted("site 0", "evaluating", 12, 14, at=12, step=8, scores={"pass@1": 0.5})
    noted("site 0", "evaluating", 10, 10, at=10, step=0, scores={"pass@1": 0.25})
    noted("site 0", "exchanging", 19, 20)
    notes.counts.update({"groups": 4, "reward of groups, in thousandths": 3000})
    notes.staleness.update({1: 10, 0: 30})
    found = figures(config_of(), [1], notes)
    assert found["shares"]["worker 0"] == {"waiting": 0.5, "sampling": 0.5}
    assert found["seconds_per_step"] == 1.0  # two of the ten seconds are an evaluation's
    assert [one["scores"]["pass@1"] for one in found["evaluations"]] == [0.25, 0.5]
    assert found["reward"] == 0.75
    assert found["mean_staleness"] == 0.25


def test_a_version_that_nobody_publishes_is_asked_for_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.pipeline.controller._UNPUBLISHED", 0.02)

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1"))
        await controller.published(1)
        with pytest.raises(TimeoutError):  # others are sampling, it waits
            await asyncio.wait_for(controller.take("site 0", 1, 1), 0.1)
        assert await controller.take("site 0", 2, 1) is None
        await answered(controller, "a", 1)
        assert await controller.take("site 0", 2, 5) is None
        assert await controller.take("site 0", 2, 4) == [bytes([k]) for k in range(8, 12)]  # none is lost
        await controller.published(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(controller.take("site 0", 2, 1), 0.1)

    asyncio.run(play())


def test_what_a_lost_trainer_asked_for_is_not_given_to_nobody() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        lost = asyncio.create_task(controller.take("site 0", 1, 8))
        await asyncio.sleep(0)
        assert await answered(controller, "a", 1) == [0, 1, 2, 3]
        await asyncio.sleep(0.01)  # four of eight are in its hands
        back = asyncio.create_task(controller.take("site 0", 1, 8))
        assert await answered(controller, "a", 1) == [4, 5, 6, 7]
        assert await asyncio.wait_for(lost, 2) is None
        assert await asyncio.wait_for(back, 2) == [bytes([k]) for k in range(8)]
        assert await answered(controller, "a", 1) is None  # the round has all that it may

    asyncio.run(play())


def compared(*more: str) -> PipelineCompareConfig:
    return load(PipelineCompareConfig, [*SMALL, *more])


def test_a_comparison_has_a_run_for_each_choice_and_seed() -> None:
    runs = runs_of(
        compared("seeds=2", "seed=5", 'runs={"staleness {max_staleness}": {over: {max_staleness: [0, 2]}}}')
    )
    assert [(one.label, one.config.seed, one.config.max_staleness) for one in runs] == [
        ("staleness 0", 5, 0),
        ("staleness 2", 5, 2),
        ("staleness 0", 6, 0),
        ("staleness 2", 6, 2),
    ]
    with pytest.raises(ExperimentError, match=r"unknown key 'runs\.a\.stalenes'; did you mean"):
        runs_of(compared("runs={a: {stalenes: 0}}"))
    with pytest.raises(ExperimentError, match="two runs would be kept in one file"):
        runs_of(compared("runs={a: {}, A: {}}"))
    with pytest.raises(ExperimentError, match="a comparison needs runs"):
        compared()


def test_a_run_that_is_stored_counts_as_long_as_its_settings_are_the_same(tmp_path: Path) -> None:
    (one,) = runs_of(compared("runs={a: {workers: 3}}"))
    assert one.stored(tmp_path) is None
    one.path(tmp_path).parent.mkdir()
    one.path(tmp_path).write_text(json.dumps(found_by(one.config)))
    assert one.stored(tmp_path) is not None
    (elsewhere,) = runs_of(compared("runs={a: {workers: 3}}", "weights=/elsewhere"))
    assert elsewhere.stored(tmp_path) is not None
    (other,) = runs_of(compared("runs={a: {workers: 4}}"))
    assert other.stored(tmp_path) is None


def found_by(config: PipelineConfig, score: float = 0.5) -> dict[str, Any]:
    notes = Notes()
    for part, what, begun, ended in (
        ("site 0, store", "writing", 9, 10),
        ("site 0", "training", 10, 15),
        ("site 0", "exchanging", 19, 20),
        ("site 0", "evaluating", 20, 21),
        ("site 1", "training", 10, 11),
        ("worker 0", "sampling", 10, 20),
    ):
        about = {"step": config.steps, "at": 20, "scores": {"pass@1": score}} if what == "evaluating" else {}
        notes.events.append({"part": part, "what": what, "from": begun, "to": ended} | about)
    notes.counts.update({"groups": 8, "tokens": 200, "round bytes": 3_000_000})
    notes.staleness.update({0: 100, 2: 50})
    notes.said.append("worker 0: <lost>")
    return figures(config, [1, 1], notes)


def test_the_table_of_a_comparison() -> None:
    config = config_of()
    text = table({"a": [found_by(config, 0.5), found_by(config, 0.5)], "b": [found_by(config, 0.25)]})
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    seconds = f"{10 / config.steps:.3f}"
    assert rows[0] == list(COLUMNS)
    assert rows[2] == [
        "a",
        "50.0 ± 0.0",
        f"{seconds} ± 0.000",
        "0.67 ± 0.00",
        "25.0% ± 0.0",
        "30% ± 0",
        "3.00 ± 0.00",
    ]
    assert rows[3] == ["b", "25.0", seconds, "0.67", "25.0%", "30%", "3.00"]


def test_the_report_of_a_run_has_its_flows_and_what_went_wrong(tmp_path: Path) -> None:
    found = found_by(config_of())
    draw(found, tmp_path / "pipeline.png")
    text = page(found, tmp_path / "pipeline.png")
    assert "<td>between the sites: their rounds, as sent by all of them</td><td>3,000,000</td>" in text
    assert "worker 0: &lt;lost&gt;" in text
    assert "<td>site 1</td><td>10%</td><td></td>" in text
    assert "data:image/png;base64," in text


class Model(torch.nn.Module):
    """What an engine samples from: all that counts here is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4096))

    @property
    def checkpoint(self) -> torch.nn.Module:
        return self


@pytest.mark.parametrize("patches", [True, False])
def test_an_engine_has_the_weights_of_the_newest_version(
    patches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pipeline.engine.language_model", lambda config: Model())
    url, source, newest = str(tmp_path / "weights"), Model(), 0
    diary = Diary("worker", NobodysController())
    engine = TorchEngine(config_of(f"patches={str(patches).lower()}"), url, diary, lambda version: newest)
    publisher = loco.sync.Publisher(source, url)
    read = []
    for version in (1, 2, 3):
        with torch.no_grad():
            source.weight[version] += 1
        if not patches:
            publisher = loco.sync.Publisher(source, whole(url, version))
        publisher.publish(version)
        newest = version
        engine.wait_for(version)
        assert torch.equal(engine.model.checkpoint.state_dict()["weight"], source.weight.bfloat16().float())
        read.append(diary.notes.counts["patch bytes"])
    engine.close()
    last = read[2] - read[1]
    assert last < read[0] / 10 if patches else last == pytest.approx(read[0], rel=0.1)


def test_an_engine_says_once_that_it_gets_no_newer_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pipeline.engine.language_model", lambda config: Model())
    monkeypatch.setattr("experiments.pipeline.engine.POLL", 0.02)
    folder = tmp_path / "weights"
    loco.sync.Publisher(Model(), str(folder)).publish(1)
    diary = Diary("worker", NobodysController())
    said: list[str] = []
    monkeypatch.setattr(diary, "say", said.append)
    engine = TorchEngine(config_of(), str(folder), diary, lambda version: 2)
    engine.wait_for(1)
    waiting = threading.Thread(target=engine.wait_for, args=(2,))
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("no folder")
    waiting.start()
    until = time.monotonic() + 30
    while not said and time.monotonic() < until:
        time.sleep(0.01)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    again = loco.sync.Publisher(Model(), str(folder))
    again.publish(2)
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(said) == 1
    assert said[0].startswith("no newer weights for now")
    engine.close()


def test_curves_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def noted(part: str, what: str, **about: Any) -> dict[str, Any]:
        return {"part": part, "what": what, "from": 5.0, "to": 7.0} | about

    (tmp_path / "older").write_text("of an earlier run")
    with Curves(tmp_path) as curves:
        notes = Notes()
        notes.events += [
            noted("site 0", "training", step=3),
            noted("site 0", "evaluating", step=8, scores={"pass@1": 0.5}),
            noted("site 0, store", "writing", version=2, bytes=100),
            noted("worker 0", "sampling", tokens=50),
            noted("worker 0", "waiting"),
        ]
        notes.staleness.update({0: 3, 2: 1})
        curves.add(notes, 2)
        curves.add(Notes(), 2)
        found = EventAccumulator(str(tmp_path)).Reload()
        values = {
            tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]
        }
    assert not (tmp_path / "older").exists()
    assert values == {
        "seconds of training/site 0": [(3, 2.0)],
        "score/pass@1": [(8, 0.5)],
        "bytes/of a version": [(2, 100.0)],
        "tokens per second/worker 0": [(1, 25.0)],
        "staleness of tokens": [(2, 0.5)],
    }


def test_a_worker_hears_of_a_version_when_it_is_published() -> None:
    async def play() -> None:
        controller = Controller(config_of())
        assert await controller.newer(0, 0.01) == 0
        asked = asyncio.create_task(controller.newer(0, 60.0))
        await asyncio.sleep(0.01)
        await controller.published(1)
        assert await asyncio.wait_for(asked, 1.0) == 1
        assert await controller.newer(0, 60.0) == 1

    asyncio.run(play())


class Site:
    """That publishes to a folder of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("experiments.pipeline.publishing.answer_of", lambda answer: answer)
        monkeypatch.setattr("experiments.pipeline.publishing._PAUSE", 0.02)
        self.folder, self.model, self.controller = folder / "weights", Model(), NobodysController()
        diary = Diary("site 0", self.controller)
        self.publishing = Publishing(self.model, str(self.folder), config_of(), self.controller, diary)

    def published(self) -> Tensor:
        """The newest version's weights."""
        held = {"weight": torch.zeros(4096, dtype=torch.bfloat16)}
        loco.sync.Subscriber(held, str(self.folder)).update()
        return held["weight"]


def test_weights_may_change_while_a_thread_writes_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    before = site.model.weight.detach().bfloat16()
    for version in (1, 2):
        site.publishing.begin(version)
        with torch.no_grad():
            site.model.weight.add_(1)
        site.publishing.close() if version == 2 else site.publishing.finish()
        assert torch.equal(site.published(), before)
        before = site.model.weight.detach().bfloat16()
    assert site.controller.versions == [1, 2]
    assert site.controller.said == []


def test_the_next_version_makes_up_for_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    site.publishing.begin(1)
    site.publishing.finish()
    site.folder.rename(tmp_path / "elsewhere")
    site.folder.write_text("no folder")
    for version in (2, 3):
        site.publishing.begin(version)
        site.publishing.finish()
    assert site.controller.versions == [1]
    site.folder.unlink()
    (tmp_path / "elsewhere").rename(site.folder)
    site.publishing.begin(4)
    site.publishing.close()
    assert site.controller.versions == [1, 4]
    assert torch.equal(site.published(), site.model.weight.detach().bfloat16())
    first, second = site.controller.said
    assert first.startswith("site 0, store: version 2 can't be published yet: ")
    assert second == "site 0, store: version 4 is published"


def test_a_version_that_is_missing_is_published_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    site.folder.write_text("no folder")
    mended = threading.Timer(0.2, site.folder.unlink)
    mended.start()
    site.publishing.until_there(1)
    assert site.controller.versions == [1]
    assert torch.equal(site.published(), site.model.weight.detach().bfloat16())
    site.publishing.until_there(1)  # it is
    assert site.controller.versions == [1]


def test_a_version_that_another_site_has_published_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Site(tmp_path, monkeypatch), Site(tmp_path, monkeypatch)
    for site in (one, other):
        site.publishing.begin(1)
        site.publishing.finish()
        assert site.controller.versions == [1]
    assert torch.equal(one.published(), one.model.weight.detach().bfloat16())
    other.publishing.begin(2)
    other.publishing.close()
    one.publishing.begin(2)
    one.publishing.close()
    assert one.controller.versions == other.controller.versions == [1, 2]
