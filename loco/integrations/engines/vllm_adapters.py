"""A LoRA adapter of a running vLLM that follows its publisher.

It has two of vLLM's slots. While the engine generates, a version is decoded and loaded as vLLM loads an
adapter from its folder, into the slot that no request uses. Between two steps the slots change places: that
takes as long for a large adapter as for a small one, and the version before stays in the other slot until the
next is loaded.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from loco.sync import Subscriber

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Loaded(NamedTuple):
    """What lies in the slot that no request uses."""

    version: int


class Adapter:
    """
    Args:
        number: the `lora_int_id` of its requests.
        folder: it as PEFT saves it: what the engine begins with.
        follow: a subscriber to its publisher that writes into these tensors.

    Raises:
        ValueError: the engine has no room for it, or can't load it.
        LayoutError: what is published are not the tensors of its folder.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        number: int,
        folder: Path,
        follow: Callable[[dict[str, Tensor]], Subscriber],
    ) -> None:
        self._slots = _Slots.of(model)
        manager = self._slots.manager
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"adapter {number}: there is no {WEIGHTS} in {folder}")
        self._number, self._folder = number, folder
        self._loader = WorkerLoRAManager(vllm_config, manager.device, getattr(model, "embedding_modules", {}))
        self._loader._adapter_manager = manager
        dtype = manager.lora_config.lora_dtype
        published = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        self._tensors = {name: one.to(published) for name, one in load_file(folder / WEIGHTS).items()}
        self._subscriber = follow(self._tensors)
        self._subscriber.check()
        self._slots.take(number, self._load(folder))
        # Which one lies in each slot: of requests, and the other.
        self._loras = [self._slots.registered(number), self._slots.registered(number)]

    def prepare(self, version: int | None = None) -> Loaded:
        """Load a version, by default the newest. No request sees anything of it."""
        self._slots.require(self._number)
        found = self._subscriber.update(version)
        with tempfile.TemporaryDirectory(prefix="loco-adapter-") as name:
            folder = Path(name)
            shutil.copy(self._folder / CONFIG, folder)
            save_file(self._tensors, folder / WEIGHTS)
            lora = self._load(folder)
        self._slots.write(self._number, lora)
        self._loras[1] = lora
        return Loaded(found.version)

    def apply(self, loaded: Loaded) -> None:
        """Between two steps of the engine: from now on requests see what was loaded last."""
        self._loras.reverse()
        self._slots.swap(self._number, self._loras[0])

    def rollback(self) -> None:
        """As before `apply`, if nothing was loaded since."""
        self._loras.reverse()
        self._slots.swap(self._number, self._loras[0])

    def leave(self) -> None:
        """Follow nobody: the adapter stays as it is, and its second slot is free."""
        self._slots.give_back(self._number)

    def _load(self, folder: Path) -> LoRAModel:
        return self._loader._load_adapter(LoRARequest(str(self._number), self._number, str(folder)))


class _Slots:
    """For each adapter that follows a publisher the slot of its requests and another one, which vLLM knows by
    the negative number. It gives neither to other adapters, and keeps both when it drops all adapters, which
    it does after every update of weights.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._of: dict[int, tuple[int, int]] = {}  # by the adapter's number
        self._drop_all = manager.remove_all_adapters
        manager.remove_all_adapters = self._drop_others

    @classmethod
    def of(cls, model: nn.Module) -> "_Slots":
        """The one of an engine.

        Raises:
            ValueError: it serves no adapters.
        """
        manager: Any = getattr(model, "lora_manager", None)
        if not isinstance(manager, LoRAModelManager):
            raise ValueError("adapters can't follow publishers: the engine was started without enable_lora")
        kept = vars(manager)
        if "loco_slots" not in kept:
            kept["loco_slots"] = cls(manager)
        return kept["loco_slots"]

    def take(self, number: int, lora: LoRAModel) -> None:
        """Two slots for an adapter, which is this one if the engine has none of that number yet."""
        manager = self.manager
        pinned = len(manager._active_adapters.pinned_items - {number})
        if pinned + 2 > manager.lora_slots:
            raise ValueError(
                f"adapter {number} needs two of the engine's max_loras={manager.lora_slots}, and {pinned} "
                f"are taken for good: an adapter that follows a publisher has two"
            )
        if number not in manager._registered_adapters:
            manager.add_adapter(lora)
        manager.activate_adapter(number)
        slots = manager.lora_index_to_id
        manager._active_adapters.pin(number)
        if None not in slots:
            manager._active_adapters.remove_oldest()
        self._of[number] = slots.index(number), slots.index(None)
        self._hold(number, self.registered(number))

    def registered(self, number: int) -> LoRAModel:
        return self.manager._registered_adapters[number]

    def write(self, number: int, lora: LoRAModel) -> None:
        """Into the slot that no request uses, as vLLM does when it activates an adapter."""
        self.manager._create_merged_loras_inplace(lora)
        slot = self._of[number][1]
        for name, module in self.manager.modules.items():
            weights = self.manager._get_lora_layer_weights(lora, name)
            if weights is None:
                module.reset_lora(slot)
            else:
                module.set_lora(slot, weights.lora_a, weights.lora_b)

    def swap(self, number: int, lora: LoRAModel) -> None:
        """
        Args:
            lora: what lies in the slot that no request uses.
        """
        self.require(number)
        used, other = self._of[number]
        self._of[number] = other, used
        self._hold(number, lora)

    def give_back(self, number: int) -> None:
        is_held = self._is_held(number)
        del self._of[number]
        if is_held:
            self.manager._active_adapters.pop(-number)

    def require(self, number: int) -> None:
        """
        Raises:
            RuntimeError: somebody has taken the adapter out.
        """
        if not self._is_held(number):
            raise RuntimeError(
                f"adapter {number} was removed or loaded anew by another call: it follows nobody until "
                f"init_weight_transfer_engine is called again"
            )

    def _is_held(self, number: int) -> bool:
        used, other = self._of[number]
        slots = self.manager.lora_index_to_id
        return (slots[used], slots[other]) == (number, -number)

    def _hold(self, number: int, lora: LoRAModel) -> None:
        manager = self.manager
        manager._registered_adapters[number] = lora
        manager._registered_adapters.pin(number)
        for one, slot in zip((number, -number), self._of[number], strict=True):
            manager.lora_index_to_id[slot] = one
            manager._active_adapters[one] = None
            manager._active_adapters.pin(one)

    def _drop_others(self) -> None:
        held = {number: self.registered(number) for number in self._of if self._is_held(number)}
        self._drop_all()
        for number, lora in held.items():
            self._hold(number, lora)
