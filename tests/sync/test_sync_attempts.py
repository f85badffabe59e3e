"""A version of several publishers is of one attempt, and of one set of weights."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_store import (
    MemoryStore,
    Weights,
    held_of,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from published import cast, same_bits
from sharded import Tied
from sites import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from loco.sync import MixedVersionError, NoVersionError, Publisher, Subscriber

KEY = b"sixteen bytes or more"


def shared(store: MemoryStore, trained: Weights, count: int = 2) -> list[Publisher]:
    return [publisher_at(store, trained, stream=(k, count), key=KEY) for k in range(count)]


def publish(publishers: list[Publisher], version: int) -> None:
    for publisher in publishers:
        publisher.publish(version)


def test_a_half_of_an_attempt_that_died_is_no_part_of_a_version_and_stops_nobody() -> None:
    """Its step 8 was lost, and came out otherwise when it was repeated: half of it was published."""
    store, trained = MemoryStore(), small_weights()
    first, lost, repeated = (torch.Generator().manual_seed(seed) for seed in range(3))
    publishers, engine = shared(store, trained), zeros(trained)
    subscriber = subscriber_at(store, engine, key=KEY)
    for version in (6, 7):
        seventh = step(trained, first)
        publish(publishers, version)
    subscriber.update()
    checkpoint = {name: tensor.clone() for name, tensor in trained.items()}
    step(trained, lost)
    publishers[0].publish(8)  # and here everything dies

    for name, tensor in checkpoint.items():
        trained[name].copy_(tensor)
    step(trained, repeated)
    publishers = shared(store, trained)
    with pytest.raises(ValueError, match="version must be > 8, which is published"):
        publishers[0].publish(8)
    with pytest.raises(
        MixedVersionError, match=r"000000000008.1-of-2.json is a share of other weights than .*8.0-of-2"
    ):
        publishers[1].publish(8)
    assert subscriber.update().version == 7
    same_bits(engine, seventh)
    for version in (9, 10):
        step(trained, repeated)
        publish(publishers, version)
        assert subscriber.update().version == version
        same_bits(engine, held_of(trained))
        subscriber.verify()


def test_a_step_that_is_repeated_bit_for_bit_completes_the_version() -> None:
    store, trained = MemoryStore(), small_weights()
    step(trained, torch.Generator().manual_seed(0))
    shared(store, trained)[0].publish(8)
    shared(store, trained)[1].publish(8)
    subscriber_at(store, engine := zeros(trained), key=KEY).update()
    same_bits(engine, held_of(trained))


def test_subscribers_take_no_mixture_that_no_publisher_has_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Both have written at the same moment, so that neither saw the other."""
    halves, trained = [MemoryStore(), MemoryStore()], small_weights()
    generator = torch.Generator().manual_seed(0)
    for k, store in enumerate(halves):
        store.files["training"] = b"the same"
        step(trained, generator)
        shared(store, trained)[k].publish(8)
    store = MemoryStore({**halves[0].files, **halves[1].files})
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine, key=KEY)
    told = "8 is none: versions/000000000008.1-of-2.json is a share of other weights"
    for version in (None, 8):
        with pytest.raises(NoVersionError, match=told):
            subscriber.update(version)
    assert caplog.text.count("version 8 is none") == 1
    same_bits(engine, zeros(trained))
    publish(shared(store, trained), 9)
    assert subscriber.update(wait=60.0).version == 9
    same_bits(engine, held_of(trained))


@pytest.mark.parametrize("wait", [True, False])
def test_sites_that_publish_between_rounds_are_told(wait: bool) -> None:
    """With other weights on each site, of which each published a half."""
    store, ours, theirs = MemoryStore(), small_weights(), small_weights()
    step(theirs, torch.Generator().manual_seed(0))
    publishers = []
    for site, trained in enumerate((ours, theirs)):
        topology: Any = SimpleNamespace(site=site, num_sites=2, rank_in_site=0, ranks_per_site=1)
        publishers.append(publisher_at(store, trained, stream=topology))
    publishers[0].publish(1)
    with ExitStack() as stack:
        told = "All publishers must hold the same weights, as after a round"
        stack.enter_context(pytest.raises(MixedVersionError, match=told))
        publishers[1].publish(1, wait=wait)
        publishers[1].flush()
    with pytest.raises(NoVersionError, match="of version 1 there are 1 of 2 parts"):
        subscriber_at(store, zeros(ours)).update()
    for name, tensor in ours.items():
        theirs[name].copy_(tensor)
    publish(publishers, 2)
    subscriber_at(store, engine := zeros(ours)).update()
    same_bits(engine, held_of(ours))


# ---- shards, which nobody else holds ----


def whole(model: Tied) -> dict[str, torch.Tensor]:
    found = {name: cast(p.full_tensor()) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {**found, "head.weight": found["embed.weight"]}


def publish_shards(rank: int, folder: str, versions: list[int], ranks: list[list[int]], lr: float) -> Any:
    """Each version by these ranks alone -> the weights at the end, and what each publish raised."""
    model, raised = Tied(), list[str]()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    publisher = Publisher(model, folder, stream=(rank, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for version, who in zip(versions, ranks, strict=True):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for k in range(2):
            if rank == k and k in who:
                try:
                    publisher.publish(version)
                except MixedVersionError as error:
                    raised.append(str(error))
            dist.barrier()
    return {name: tensor.tolist() for name, tensor in whole(model).items()}, raised


def test_shards_of_two_launches_are_no_version(tmp_path: Path) -> None:
    both = [0, 1]
    before, _ = run_ranks(2, publish_shards, str(tmp_path), [1, 2], [both, [0]], 1e-3)[0]
    engine = {
        name: torch.zeros(torch.tensor(rows).shape, dtype=torch.bfloat16) for name, rows in before.items()
    }
    engine["head.weight"] = engine["embed.weight"]
    subscriber = Subscriber(engine, tmp_path)
    assert subscriber.update().version == 1
    # The second launch repeats version 2, which only the first launch's first rank had published.
    results = run_ranks(2, publish_shards, str(tmp_path), [2, 3], [[1], both], 1e-2)
    (told,) = results[1][1]
    assert "000000000002.1-of-2.json is of another attempt than" in told
    assert results[0][1] == []
    with pytest.raises(NoVersionError):
        Subscriber(engine, tmp_path).update(2)
    assert subscriber.update().version == 3
    after = {name: torch.tensor(rows).bfloat16() for name, rows in results[0][0].items()}
    same_bits(engine, {name: after[name] for name in engine})
