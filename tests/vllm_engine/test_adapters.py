"""LoRA adapters of an engine follow publishers of their own: each version is what a fresh load of it is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import SLOTS, AdapterTrainer, adapter, in_slot, save_adapter
from models import save
from plain_engine import GREEDY, PROMPTS, build, generate, keep_weights_plain, update
from safetensors.torch import load_file
from torch import Tensor
from trained import publish
from vllm import LLM, RequestOutput
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest

from loco.sync import LayoutError, NoVersionError, Publisher, SyncError

LOCO = WeightTransferConfig(backend="loco")
Known = tuple[dict[str, Tensor], Any]


def request(folder: Path, name: str, number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(folder / name))


def slot(engine: LLM, number: int) -> dict[str, Tensor]:
    """What lies in the slot of an adapter's requests."""
    return engine.apply_model(
        lambda model: {name: bits.clone() for name, bits in in_slot(model, number).items()}
    )[0]


def known(engine: LLM, asked: LoRARequest) -> Known:
    generated = generate(engine, adapter=asked)  # which loads it
    return slot(engine, asked.lora_int_id), generated


def same(one: Known, other: Known) -> bool:
    return one[1] == other[1] and all(torch.equal(bits, other[0][name]) for name, bits in one[0].items())


def follow(folder: Path, trained: AdapterTrainer, engine: LLM | None = None) -> LLM:
    """An engine whose adapter 1 follows its publisher."""
    engine = engine or build(folder / "1", weight_transfer_config=LOCO, **SLOTS)
    engine.init_weight_transfer_engine({"init_info": {"adapters": {"1": trained.followed()}}})
    return engine


def before_last_layer(model: Any) -> Any:
    return list(model.lora_manager.modules.values())[-2]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdapterTrainer:
    keep_weights_plain(monkeypatch)
    return AdapterTrainer(tmp_path, save("llama", tmp_path / "1"))


@pytest.mark.parametrize("slots", [2, 1])
def test_each_version_of_an_adapter_is_a_fresh_load_of_it(
    slots: int, tmp_path: Path, trained: AdapterTrainer
) -> None:
    """Also where no second slot is free."""
    for _ in range(3):
        trained.step()
    fresh = {
        v: known(build(tmp_path / "1", **SLOTS), request(tmp_path, f"adapter-{v}")) for v in (1, 2, 3, 4)
    }
    assert len({str(one[1]) for one in fresh.values()}) == 4
    engine = build(tmp_path / "1", weight_transfer_config=LOCO, **SLOTS | {"max_loras": slots})
    follow(tmp_path, trained, engine)
    served = request(tmp_path, "adapter-1")  # its requests go on naming the folder that they began with
    assert same(known(engine, served), fresh[1])
    base = generate(engine)
    for version in (2, 4, 3):
        update(engine, **{"1": version})
        assert same(known(engine, served), fresh[version])
    update(engine)  # the newest
    assert same(known(engine, served), fresh[4])
    trained.step()
    update(engine)
    assert same(known(engine, served), known(build(tmp_path / "1", **SLOTS), request(tmp_path, "adapter-5")))
    assert generate(engine) == base
    # Followed anew, it is where it was, in as many slots.
    assert same(known(follow(tmp_path, trained, engine), served), known(engine, served))
    update(engine, **{"1": 2})
    assert same(known(engine, served), fresh[2])


def test_weights_and_several_adapters_change_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    publish("qwen2", tmp_path, 3)
    checkpoint = load_file(tmp_path / "1/model.safetensors")
    one, two = (AdapterTrainer(tmp_path, checkpoint, name) for name in ("one", "second"))
    one.step()
    two.step()
    more = {"max_loras": 3, "max_cpu_loras": 5}
    engine = build(tmp_path / "1", weight_transfer_config=LOCO, **SLOTS | more)
    adapters = {"1": one.followed(), "2": two.followed()}
    init_info = {"url": str(tmp_path / "url"), "adapters": adapters}
    engine.init_weight_transfer_engine({"init_info": init_info})
    third = save_adapter(tmp_path / "third", adapter(checkpoint, 77))

    def all_of(engine: LLM, first: str, second: str) -> list[Any]:
        asked = [request(tmp_path, first), request(tmp_path, second, 2), LoRARequest("third", 3, str(third))]
        return [generate(engine), *(known(engine, one)[1] for one in asked)]

    for version, of_one, of_two in ((2, 2, 1), (3, 1, 2)):
        update(engine, version, **{"1": of_one, "2": of_two})
        fresh = build(tmp_path / str(version), **SLOTS | more)
        expected = all_of(fresh, f"one-{of_one}", f"second-{of_two}")
        assert all_of(engine, "one-1", "second-1") == expected


def test_requests_in_flight_change_between_two_tokens(tmp_path: Path, trained: AdapterTrainer) -> None:
    trained.step()
    engine = follow(tmp_path, trained)
    served = request(tmp_path, "adapter-1")
    old = generate(engine, adapter=served)[0]

    def interrupted(*versions: int) -> list[list[int]]:
        """Tokens of requests during which the adapter becomes these versions, between two steps."""
        engine.reset_prefix_cache()
        for number, prompt in enumerate(PROMPTS):
            inputs: Any = {"prompt_token_ids": prompt}
            engine.llm_engine.add_request(str(number), inputs, GREEDY, lora_request=served)
        tokens: dict[str, list[int]] = {}
        for step in range(30):
            if step == 6:
                for version in versions:
                    engine.start_weight_update()
                    engine.update_weights({"update_info": {"adapters": {"1": version}}})
                    engine.finish_weight_update()
            for one in engine.llm_engine.step():
                assert isinstance(one, RequestOutput)
                tokens[one.request_id[:1]] = list(one.outputs[0].token_ids)
            if not engine.llm_engine.has_unfinished_requests():
                break
        return [tokens[str(number)] for number in range(len(PROMPTS))]

    assert interrupted() == old
    assert interrupted(2, 1) == old  # nothing but the slot has changed
    mixed = interrupted(2)
    assert [one[:5] for one in mixed] == [one[:5] for one in old]
    assert mixed != old
    engine.reset_prefix_cache()
    fresh = build(tmp_path / "1", **SLOTS)
    assert generate(engine, adapter=served) == generate(fresh, adapter=request(tmp_path, "adapter-2"))


def test_a_version_that_can_not_be_had_leaves_the_adapter_as_it_is(
    tmp_path: Path, trained: AdapterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = follow(tmp_path, trained)
    served = request(tmp_path, "adapter-1")
    fresh = known(build(tmp_path / "1", **SLOTS), served)

    def fails(error: type[Exception], said: str, **asked: int) -> None:
        engine.start_weight_update()
        with pytest.raises(error, match=said):
            engine.update_weights({"update_info": {"adapters": asked}})
        assert same(known(engine, served), fresh)

    fails(NoVersionError, "has no version 9", **{"1": 9})
    fails(ValueError, "named no publisher of adapter 2", **{"2": 1})
    trained.step()
    with monkeypatch.context() as patched:
        (layer,) = engine.apply_model(before_last_layer)
        patched.setattr(layer, "set_lora", None)  # when the layers before it have been written
        fails(TypeError, "not callable", **{"1": 2})
    update(engine)
    fresh = known(build(tmp_path / "1", **SLOTS), request(tmp_path, "adapter-2"))
    assert same(known(engine, served), fresh)
    trained.step()
    for file in (tmp_path / "url of adapter/weights").glob("*3.0-of-1.*"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    fails(SyncError, "damaged", **{"1": 3})


def test_other_adapters_may_want_all_slots(tmp_path: Path, trained: AdapterTrainer) -> None:
    for _ in range(3):
        trained.step()
    checkpoint, engine = load_file(tmp_path / "1/model.safetensors"), follow(tmp_path, trained)
    served = request(tmp_path, "adapter-1")
    others = [
        LoRARequest(str(n), n, str(save_adapter(tmp_path / str(n), adapter(checkpoint, n))))
        for n in range(5, 9)
    ]
    fresh = build(tmp_path / "1", **SLOTS)
    expected = [generate(fresh, adapter=one) for one in others]
    of_versions = {
        version: generate(fresh, adapter=request(tmp_path, f"adapter-{version}", number=20 + version))
        for version in (1, 2, 3, 4)
    }
    for version in (2, 3, 4):
        assert generate(engine, adapter=served) == of_versions[version - 1]
        engine.start_weight_update()
        assert [generate(engine, adapter=one) for one in others] == expected
        engine.update_weights({"update_info": {"adapters": {"1": version}}})
        assert generate(engine, adapter=others[version - 1]) == expected[version - 1]
        engine.reset_prefix_cache()
        # Many at once, of which the engine takes two at a time.
        for number, one in enumerate([*others, served, others[0]]):
            inputs: Any = {"prompt_token_ids": PROMPTS[0]}
            engine.llm_engine.add_request(str(number), inputs, GREEDY, lora_request=one)
        tokens: dict[str, list[int]] = {}
        while engine.llm_engine.has_unfinished_requests():
            for output in engine.llm_engine.step():
                assert isinstance(output, RequestOutput)
                tokens[output.request_id[:1]] = list(output.outputs[0].token_ids)
        assert tokens["4"] == of_versions[version][0][0]
        assert [tokens[k] for k in "01235"] == [one[0][0] for one in (*expected, expected[0])]
        engine.finish_weight_update(str(version))
        engine.reset_prefix_cache()
    assert generate(engine, adapter=served) == of_versions[4]


def test_one_that_is_followed_is_not_loaded_from_its_folder_again(
    tmp_path: Path, trained: AdapterTrainer
) -> None:
    trained.step()
    engine = follow(tmp_path, trained)
    update(engine)
    served = request(tmp_path, "adapter-1")
    second = known(engine, served)
    assert not engine.llm_engine.remove_lora(1)
    assert same(known(engine, served), second)
    again = LoRARequest("again", 1, served.lora_path, load_inplace=True)
    engine.reset_prefix_cache()
    assert same(known(engine, again), second)
    # When nobody follows any more vLLM does as ever.
    engine.shutdown_weight_transfer_engine()
    engine.reset_prefix_cache()
    first = known(build(tmp_path / "1", **SLOTS), served)
    assert same(known(engine, again), first)
    assert not same(first, second)


def test_what_can_not_be_followed_is_refused(tmp_path: Path, trained: AdapterTrainer) -> None:
    followed, checkpoint = trained.followed(), load_file(tmp_path / "1/model.safetensors")
    engine = build(tmp_path / "1", weight_transfer_config=LOCO, **SLOTS)

    def refused(error: type[Exception], said: str, **init_info: Any) -> None:
        with pytest.raises(error, match=said):
            engine.init_weight_transfer_engine({"init_info": init_info})

    refused(ValueError, "must name the url of the weights' publisher, or adapters, or both")
    refused(ValueError, "adapter 1 needs a url and a folder, got url", adapters={"1": {"url": "x"}})
    refused(
        ValueError, "there is no adapter_model.safetensors in", adapters={"1": followed | {"folder": "x"}}
    )
    refused(ValueError, "named by the lora_int_id of its requests, got '01'", adapters={"01": followed})
    refused(
        ValueError,
        r"max_cpu_loras must be at least 5, as adapter 3 .* beside max_loras=2 others .*; it is 4",
        adapters={"1": followed, "2": followed, "3": followed},
    )
    Publisher(checkpoint, tmp_path / "whole").publish()
    other = followed | {"url": str(tmp_path / "whole")}
    refused(LayoutError, "is published, and there is no such tensor here", adapters={"1": other})
    too_large = tmp_path / "too large"
    shutil.copytree(followed["folder"], too_large)
    config = (too_large / "adapter_config.json").read_text()
    (too_large / "adapter_config.json").write_text(config.replace('"r": 8', '"r": 16'))
    refused(ValueError, "max_lora_rank", adapters={"1": followed | {"folder": str(too_large)}})
    # After all of that the engine has room.
    follow(tmp_path, trained, engine)
    engine = build(tmp_path / "1", weight_transfer_config=LOCO)
    refused(ValueError, "started without enable_lora", adapters={"1": followed})
