"""LoRA adapters of the checkpoints of `models`, as PEFT saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from loco.sync import Publisher

RANK = 8
# alpha / RANK is no power of two, so that vLLM rounds when it multiplies.
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "bias": "none"}
CONFIG |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
SLOTS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": RANK}  # of an engine


def adapter(checkpoint: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """FP32, as PEFT trains it."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in checkpoint.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) / 10
            found[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) / 10
    return found


def save_adapter(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder


def in_slot(model: Any, number: int) -> dict[str, Tensor]:
    """What an engine has in the slot of an adapter's requests. Of the table of words, which is of no adapter
    here, it has another form."""
    manager = model.lora_manager
    at = manager.lora_index_to_id.index(number)
    return {
        f"{name} {kind} {k}": stacked[at]
        for name, layer in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        if isinstance(getattr(layer, kind), tuple)
        for k, stacked in enumerate(getattr(layer, kind))
    }


class AdapterTrainer:
    """Publishes an adapter under `url of NAME`. Folder `NAME-2` holds it as of its version 2.

    Args:
        first: version.
    """

    def __init__(
        self, folder: Path, checkpoint: dict[str, Tensor], name: str = "adapter", first: int = 1
    ) -> None:
        self._checkpoint, self._folder, self._name = checkpoint, folder, name
        self._seed, self._version = 1000 * len(name), first
        self._tensors = adapter(checkpoint, self._seed)
        self._publisher = Publisher(self._tensors, folder / f"url of {name}")
        self._publish()

    def step(self) -> None:
        self._seed += 1
        for name, new in adapter(self._checkpoint, self._seed).items():
            old = self._tensors[name].view(-1)
            old[::3] = new.view(-1)[::3]
        self._publish()

    def _publish(self) -> None:
        self._publisher.publish(self._version)
        save_adapter(self._folder / f"{self._name}-{self._version}", self._tensors)
        self._version += 1

    def followed(self) -> dict[str, str]:
        """For `init_info.adapters`."""
        folder = self._folder / f"{self._name}-1"
        return {"url": str(self._folder / f"url of {self._name}"), "folder": str(folder)}
