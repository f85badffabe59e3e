"""A LoRA adapter of a PEFT model as a stream of its own."""

from pathlib import Path

import pytest
import torch
from claims import same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from sites import launch_worlds
from test_callback import name
from test_trainer import BATCH, STEPS, arguments
from tiny import dataset, llama, site_tokens
from torch import Tensor
from transformers import Trainer

from loco.integrations.transformers import LocoCallback
from loco.sync import Publisher, Subscriber, lora_adapter

# PEFT 0.21 asks transformers 5.23 for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def with_adapters() -> PeftModel:
    model = get_peft_model(llama(), LORA)
    assert isinstance(model, PeftModel)
    model.add_adapter("other", LORA)
    return model


def saved(model: PeftModel, folder: Path, adapter: str = "default") -> dict[str, Tensor]:
    model.save_pretrained(str(folder), selected_adapters=[adapter], save_embedding_layers=False)
    return load_file(folder / ("" if adapter == "default" else adapter) / "adapter_model.safetensors")


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_an_adapter_is_published_as_peft_saves_it(tmp_path: Path, adapter: str) -> None:
    model = with_adapters()
    publisher = Publisher(lora_adapter(model, adapter), tmp_path / "url")
    engine = {
        k: torch.zeros_like(t, dtype=torch.bfloat16) for k, t in saved(model, tmp_path / "1", adapter).items()
    }
    subscriber = Subscriber(engine, tmp_path / "url")
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        publisher.publish()
        subscriber.update()
        expected = saved(model, tmp_path / f"after {version}", adapter)
        assert engine.keys() == expected.keys()
        assert same_bits(list(engine.values()), [expected[k].bfloat16() for k in engine])


def test_an_adapter_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a model of PEFT, got LlamaForCausalLM"):
        lora_adapter(llama())
    with pytest.raises(ValueError, match="no adapter named 'third', but these: default, other"):
        lora_adapter(with_adapters(), "third")


def publishing_site(folder: str) -> dict[str, Tensor]:
    model = get_peft_model(llama(), LORA)
    assert isinstance(model, PeftModel)
    callback = LocoCallback(publish=f"{folder}/weights")
    rows = dataset(site_tokens(BATCH * STEPS))
    Trainer(model, arguments(f"{folder}/{name()}"), train_dataset=rows, callbacks=[callback]).train()
    return saved(model, Path(folder) / name() / "adapter")


def test_the_trainers_callback_publishes_the_adapter_of_a_peft_model(tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(publishing_site, str(tmp_path))
    assert same_bits(list(berlin.values()), list(paris.values()))
    engine = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in berlin.items()}
    Subscriber(engine, tmp_path / "weights").update()
    assert same_bits(list(engine.values()), [value.bfloat16() for value in berlin.values()])
