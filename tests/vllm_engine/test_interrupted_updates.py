"""An update of a running engine that Ctrl-C or an error ends, at any line: it has the old version, or the new
one, and can go to any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import SLOTS, AdapterTrainer, in_slot
from interruption import Interruption
from models import save
from plain_engine import build, follow, generate, keep_weights_plain, same_bits, update
from test_adapters import follow as follow_adapter
from test_adapters import request
from test_fp8 import Trainer
from torch import Tensor, nn
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.lora.layers import RowParallelLinearWithLoRA

WITHIN = r"loco\.(integrations\.|sync\.(subscriber|journal)\.)"
Look = Callable[[Any], dict[str, Tensor]]


def all_of(model: nn.Module) -> dict[str, Tensor]:
    """What its layers hold, also what they have computed from weights."""
    return {
        f"{layer} {name}": held.reshape(-1).clone()
        for layer, module in model.named_modules()
        for name, held in (vars(module) | dict(module.named_parameters(recurse=False))).items()
        if isinstance(held, Tensor) and name != "kv_cache"
    }


def adapter_1(model: nn.Module) -> dict[str, Tensor]:
    """In host memory, and in the slot of its requests, if they have one."""
    manager: Any = model.lora_manager
    found = in_slot(model, 1) if 1 in manager.lora_index_to_id else {}
    for name, layer in manager._registered_adapters[1].loras.items():
        both = {"a": layer.lora_a, "b": layer.lora_b}
        for kind, held in both.items():
            for k, one in enumerate(held if isinstance(held, list) else [held]):
                found[f"{name} {kind} {k}"] = one
    return {name: held.clone() for name, held in found.items()}


def interrupt_at_every_line(engine: LLM, look: Look, *versions: dict[str, Any]) -> int:
    """On the way from the first to the second one -> how many updates were interrupted."""

    def known() -> dict[str, Tensor]:
        return engine.apply_model(look)[0]

    states = []
    for version in versions[::-1]:
        update(engine, **version)
        states.insert(0, known())
    old, new = states
    assert not same_bits(old, new)
    number, target = 1, dict(versions[1])
    info = {"version": target.pop("version", None), "adapters": target}
    while True:
        engine.start_weight_update()
        interruption = Interruption(number, WITHIN)
        try:
            with interruption:
                engine.update_weights({"update_info": info})
        except KeyboardInterrupt:
            found = known()
            assert same_bits(found, old) or same_bits(found, new), interruption.where
        else:
            engine.finish_weight_update()
            return number - 1
        update(engine, **versions[0])
        assert same_bits(known(), old), interruption.where
        number += 1


def test_quantised_weights_and_what_is_computed_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    trainer = Trainer("deepseek_v3", tmp_path)
    engine = follow(tmp_path)
    trainer.step()
    assert interrupt_at_every_line(engine, all_of, {"version": 1}, {"version": 2}) > 100


def with_adapter(folder: Path, slots: int) -> LLM:
    """An engine whose adapter 1 follows a trainer, which has published two versions."""
    trained = AdapterTrainer(folder, save("llama", folder / "1"))
    trained.step()
    loco = WeightTransferConfig(backend="loco")
    engine = build(folder / "1", weight_transfer_config=loco, **SLOTS | {"max_loras": slots})
    return follow_adapter(folder, trained, engine)


@pytest.mark.parametrize(("slots", "is_asked_for"), [(2, True), (1, True), (2, False)])
def test_an_adapter(slots: int, is_asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no second slot is free, and where requests have no slot yet."""
    keep_weights_plain(monkeypatch)
    engine, served = with_adapter(tmp_path, slots), request(tmp_path, "adapter-1")
    old = generate(engine, adapter=served) if is_asked_for else None
    assert interrupt_at_every_line(engine, adapter_1, {"1": 1}, {"1": 2}) > 50
    new = generate(engine, adapter=served)
    assert new != old
    assert new == generate(build(tmp_path / "1", **SLOTS), adapter=request(tmp_path, "adapter-2"))


def test_an_adapter_that_can_not_be_written_whole_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    engine, served = with_adapter(tmp_path, 1), request(tmp_path, "adapter-1")
    old = generate(engine, adapter=served)
    write, calls = RowParallelLinearWithLoRA.set_lora, []

    def failing(layer: RowParallelLinearWithLoRA, *given: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise MemoryError("in the second layer")
        write(layer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(RowParallelLinearWithLoRA, "set_lora", failing)
        engine.start_weight_update()
        with pytest.raises(MemoryError, match="in the second layer"):
            engine.update_weights({"update_info": {"adapters": {"1": 2}}})
    assert len(calls) > 2  # the old version was written again
    engine.reset_prefix_cache()
    assert generate(engine, adapter=served) == old
