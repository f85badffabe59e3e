"""verl's checkpoint engine "loco": rollout workers receive the actor's weights as what changed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save, save_changed
from plain_engine import build, generate, keep_weights_plain, same_bits, weights
from torch import Tensor
from trained import LR
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from loco.sync import NoVersionError

Weights = dict[str, Tensor]


def new(folder: Path, is_master: bool | None = None, **options: Any) -> CheckpointEngine:
    """As verl makes one: of an actor's rank, or of a rollout worker."""
    import_external_libs("loco.integrations.verl")
    given = {} if is_master is None else {"is_master": is_master}
    return CheckpointEngineRegistry.new(
        "loco", bucket_size=1 << 20, url=str(folder / "url"), **given, **options
    )


def one_by_one(tensors: Weights, passed: list[str]) -> Generator[tuple[str, Tensor], None, None]:
    """Each in memory that the next one takes."""
    memory = torch.empty(max(one.numel() for one in tensors.values()))
    for name, tensor in tensors.items():
        passed.append(name)
        yield name, memory[: tensor.numel()].copy_(tensor.flatten()).view(tensor.shape)


def transfer(
    actors: list[CheckpointEngine], rollouts: list[CheckpointEngine], tensors: Weights
) -> tuple[list[Any], list[Weights]]:
    """What verl's manager does. -> what actors report, and what each rollout worker has received"""
    everybody = [*actors, *rollouts]
    metadata = [one.prepare() for one in everybody]
    told = type(actors[0]).build_topology(len(actors), len(rollouts), metadata)
    for some, values in zip((actors, rollouts), told, strict=True):
        for k, one in enumerate(some):
            one.init_process_group(**{name: of_all[k] for name, of_all in values.items()})
    passed: list[list[str]] = [[] for _ in actors]

    async def received(one: CheckpointEngine) -> Weights:
        found: Any = one.receive_weights(global_steps=0)
        return {name: tensor.clone() async for name, tensor in found}

    async def together() -> list[Any]:
        sends = [
            one.send_weights(one_by_one(tensors, names)) for one, names in zip(actors, passed, strict=True)
        ]
        return await asyncio.gather(*(received(one) for one in rollouts), *sends)

    done = asyncio.run(together())
    for one in everybody:
        one.finalize()
    assert passed == [list(tensors)] * len(actors)  # of sharded tensors all ranks gather each
    return done[len(rollouts) :], done[: len(rollouts)]


def load(received: Weights, model: Any) -> None:
    """As verl's adapter for vLLM does."""
    model.load_weights(received.items())


class Actor:
    """FP32 weights under Adam, whose gradients are noise."""

    def __init__(self, checkpoint: Weights) -> None:
        self.weights = {name: one.float() * (1 + 2**-10) for name, one in checkpoint.items()}
        self._adam = torch.optim.Adam(self.weights.values(), lr=LR)

    def step(self) -> None:
        for one in self.weights.values():
            one.grad = torch.randn(one.shape)
        self._adam.step()

    def published(self) -> Weights:
        return {name: one.bfloat16() for name, one in self.weights.items()}


def test_rollout_workers_receive_what_changed_and_an_engine_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    torch.manual_seed(0)
    actor = Actor(save("llama", tmp_path / "1"))
    actors, rollouts = [new(tmp_path, True), new(tmp_path, False)], [new(tmp_path), new(tmp_path)]
    found: list[Weights] = []
    for step in range(4):
        if step == 2:
            rollouts.append(new(tmp_path))  # a replica that comes later
        (report, other), found = transfer(actors, rollouts, actor.weights)
        assert all(same_bits(one, actor.published()) for one in found)
        assert other == {}
        assert (report["loco/changed"] == 1) is (step == 0)
        if step:
            assert 0.005 < report["loco/changed"] < 0.05
            assert report["loco/bytes"] < 0.03 * sum(2 * one.numel() for one in actor.weights.values())
        actor.step()
    engine = build(tmp_path / "1")
    engine.apply_model(partial(load, found[0]))
    save_changed(tmp_path / "1", tmp_path / "2", found[0])
    fresh = build(tmp_path / "2")
    assert same_bits(weights(engine), weights(fresh))
    engine.reset_prefix_cache()
    assert generate(engine) == generate(fresh)
    # An actor that starts again publishes anew, and the workers follow it.
    again, before = [new(tmp_path, True)], actor.published()
    actor.step()
    _, found = transfer(again, rollouts, actor.weights)
    assert all(same_bits(one, actor.published()) for one in found)
    assert not same_bits(found[0], before)


def test_a_worker_waits_only_so_long(tmp_path: Path) -> None:
    actor, rollout = new(tmp_path, True), new(tmp_path, timeout=0.2)
    told, _ = type(actor).build_topology(1, 1, [actor.prepare(), rollout.prepare()])
    rollout.init_process_group(**{name: value for name, (value,) in told.items()})

    async def receive() -> None:
        found: Any = rollout.receive_weights()
        async for _ in found:
            pass

    with pytest.raises(NoVersionError):
        asyncio.run(receive())


def test_verl_finds_the_backend_by_its_configuration() -> None:
    """In a process that has imported nothing of loco."""
    code = (
        "import json, sys;"
        "from verl.checkpoint_engine.base import CheckpointEngineRegistry as known;"
        "from verl.utils.import_utils import import_external_libs;"
        "before = 'loco' in sys.modules;"
        "import_external_libs('loco.integrations.verl');"
        "print(json.dumps([before, known.get('loco').__name__]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [False, "LocoCheckpointEngine"]
