"""`vllm.LLM(weight_transfer_config=WeightTransferConfig("loco"))` follows what a trainer publishes."""

import gc
from pathlib import Path
from random import Random
from threading import Event
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from models import save, trainer
from plain_engine import build, follow, generate, keep_weights_plain, same_bits, update, weights
from torch import Tensor
from trained import NoisyTrainer, publish
from vllm import LLM
from vllm import _custom_ops as ops
from vllm.config import WeightTransferConfig

from loco.sync import LayoutError, NoVersionError, Prepared, Publisher, Subscriber

CODE = (type, FunctionType, ModuleType)  # through which everything is reached


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three versions, and their checkpoints."""
    keep_weights_plain(monkeypatch)
    publish("llama", tmp_path, 3)
    return tmp_path


Known = tuple[dict[str, Tensor], Any]


def known(engine: LLM) -> Known:
    return weights(engine), generate(engine)


def same(one: Known, other: Known) -> bool:
    return same_bits(one[0], other[0]) and one[1] == other[1]


def test_an_engine_becomes_the_version_it_is_asked_for_or_the_newest(folder: Path) -> None:
    fresh = {version: known(build(folder / str(version))) for version in (1, 2, 3)}
    assert not any(fresh[one][1] == fresh[other][1] for one, other in ((1, 2), (1, 3), (2, 3)))
    engine = follow(folder)
    assert same(known(engine), fresh[1])
    update(engine, 2)
    assert same(known(engine), fresh[2])
    assert engine.get_weight_version() == "version 2"
    update(engine)
    assert same(known(engine), fresh[3])
    update(engine)  # there is nothing newer
    assert same(known(engine), fresh[3])
    # A trainer that starts again: the places are known, though the weights are not the checkpoint's.
    engine.shutdown_weight_transfer_engine()
    engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url")}})
    assert same(known(engine), fresh[3])


def test_after_50_versions_at_irregular_intervals_it_is_a_fresh_engine_and_keeps_only_the_last_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    trainer, random = NoisyTrainer("llama", tmp_path), Random(0)
    engine = follow(tmp_path)
    (subscriber,) = engine.collective_rpc(lambda worker: worker.weight_transfer_engine.subscriber)
    first, version, steps = known(engine), 1, set[int]()
    while version < 50:
        steps.add(apart := min(random.randint(1, 8), 50 - version))
        before = trainer.weights
        assert all(0.01 < trainer.step() < 0.03 for _ in range(apart))
        update(engine)
        version += apart
        assert subscriber.version == version
        changes = sum(int((bits(before[name]) != bits(now)).sum()) for name, now in trainer.weights.items())
        # Of each change its position and what it overwrote.
        assert 10 * changes <= kept_bytes(subscriber, engine) < 10 * changes + 1000
    assert {1, 8} < steps
    trainer.save("50")
    last = known(engine)
    assert same(last, known(build(tmp_path / "50")))
    assert not same(last, first)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def kept_bytes(subscriber: Subscriber, engine: LLM) -> int:
    """All that the subscriber can reach, but for the engine's own weights."""
    (own,) = engine.apply_model(lambda model: {p.untyped_storage().data_ptr() for p in model.parameters()})
    known, new, sizes = {id(subscriber)}, [subscriber], dict[int, int]()
    while new:
        found = {id(one): one for one in gc.get_referents(*new)}
        new = [one for key, one in found.items() if key not in known and not isinstance(one, CODE)]
        known |= found.keys()
        for one in new:
            if isinstance(one, Tensor):
                sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            elif isinstance(one, bytes | bytearray):
                sizes[id(one)] = len(one)
    return sum(size for address, size in sizes.items() if address not in own)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_model_whose_experts_are_fused_in_memory_is_published_as_the_engine_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It was refused, and at the first update only."""
    keep_weights_plain(monkeypatch)
    trained = trainer(kind)
    trained.save_pretrained(tmp_path / "1")
    Publisher(dict(trained.named_parameters()), tmp_path / "other").publish()
    with Publisher(trained, tmp_path / "url") as publisher:
        publisher.publish()
        engine = follow(tmp_path)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[::5] *= 1.5
        publisher.publish()
    update(engine)
    trained.save_pretrained(tmp_path / "2")
    assert same(known(engine), known(build(tmp_path / "2")))
    with pytest.raises(LayoutError, match="is published, and there is no such tensor here"):
        engine.init_weight_transfer_engine({"init_info": {"url": str(tmp_path / "other")}})


def test_the_engine_generates_while_a_version_is_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, prepare = Event(), Subscriber.prepare

    def slow(subscriber: Subscriber, version: int | None = None) -> Prepared:
        assert arrived.wait(60)
        return prepare(subscriber, version)

    monkeypatch.setattr(Subscriber, "prepare", slow)
    engine = follow(folder)
    before = known(engine)
    engine.start_weight_update()
    engine.reset_prefix_cache()
    assert same(known(engine), before)
    arrived.set()
    engine.update_weights({"update_info": {}})
    engine.finish_weight_update()
    assert not same_bits(weights(engine), before[0])


def test_the_version_that_is_asked_for_counts_not_the_newest_that_could_not_be_fetched(folder: Path) -> None:
    for patch in (folder / "url" / "weights").glob("000000000003.*"):
        patch.write_bytes(b"damaged")
    engine = follow(folder)
    update(engine, 2)
    assert same_bits(weights(engine), weights(build(folder / "2")))


def test_a_version_that_is_not_there_leaves_the_engine_as_it_was(folder: Path) -> None:
    engine = follow(folder)
    before = known(engine)
    with pytest.raises(NoVersionError, match="has no version 9: there are 1 to 3"):
        update(engine, 9)
    engine.reset_prefix_cache()
    assert same(known(engine), before)
    update(engine, 2)
    engine.reset_prefix_cache()
    assert same(known(engine), known(build(folder / "2")))


def test_prefixes_are_of_the_old_weights_until_they_are_forgotten(folder: Path) -> None:
    engine = build(
        folder / "1",
        weight_transfer_config=WeightTransferConfig(backend="loco"),
        enable_prefix_caching=True,
        block_size=32,
    )
    engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url")}})
    prompt = [list(range(3, 83))]
    generate(engine, prompt)
    engine.start_weight_update()
    engine.update_weights({"update_info": {"version": 2}})
    engine.finish_weight_update()
    stale = generate(engine, prompt)
    assert engine.reset_prefix_cache()
    right = generate(build(folder / "2"), prompt)
    assert stale != right
    assert generate(engine, prompt) == right


def test_the_key_is_read_from_a_file_of_the_workers_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    create = Subscriber.__init__

    def note(subscriber: Subscriber, named: Any, url: str, *, key: bytes | None, **more: Any) -> None:
        keys.append(key)
        create(subscriber, named, url, key=key, **more)

    monkeypatch.setattr(Subscriber, "__init__", note)
    (folder / "loco.key").write_bytes(b"sixteen bytes or more")
    follow(folder, key_file=str(folder / "loco.key"))
    assert keys == [b"sixteen bytes or more"]


def test_an_update_before_there_is_a_publisher_is_refused(folder: Path) -> None:
    engine = build(folder / "1", weight_transfer_config=WeightTransferConfig(backend="loco"))
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
        engine.start_weight_update()
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine.init_weight_transfer_engine({"init_info": {"address": "somewhere"}})


def test_a_store_that_the_server_was_not_started_with_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCO_SYNC_URL", str(folder / "other"))
    with pytest.raises(ValueError, match=r"init_info\.url must be"):
        follow(folder)


def test_packed_linear_weights_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16).t(), 32)
    except RuntimeError as error:  # then vLLM keeps the weights as they are
        pytest.skip(f"oneDNN packs no BF16 weights on this CPU: {error}")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"qkv_proj\.weight is empty: the engine has packed this weight"):
        follow(folder)


def test_packed_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing keeps their shapes, so that only their values tell."""
    keep_weights_plain(monkeypatch, experts=False)
    save("qwen3_moe", tmp_path / "1")
    with pytest.raises(ValueError, match=r"experts\.0\.\w+\.weight was rearranged"):
        follow(tmp_path)


def test_a_tensor_that_is_computed_from_weights_is_refused(folder: Path) -> None:
    engine = build(folder / "1", weight_transfer_config=WeightTransferConfig(backend="loco"))

    def absorb(model: Any) -> None:
        layer = model.model.layers[1].self_attn
        layer.absorbed = layer.o_proj.weight @ layer.o_proj.weight

    engine.apply_model(absorb)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.absorbed seems to be computed from weights"):
        engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url")}})


def test_an_engine_without_weights_yet_has_its_places_all_the_same(folder: Path) -> None:
    config = WeightTransferConfig(backend="loco")
    engine = build(folder / "1", weight_transfer_config=config, load_format="dummy")
    engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url")}})
    assert torch.is_tensor(next(iter(weights(engine).values())))
