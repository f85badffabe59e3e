"""A LoRA adapter of a running vLLM that follows its publisher.

While the engine generates, a version is decoded, loaded as vLLM loads an adapter from its folder, and written
into a slot that no request uses, if one is free. Between two steps the two slots change places: that takes as
long for a large adapter as for a small one. Where no slot is free the adapter is written then.
"""

import logging
import tempfile
import threading
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
from vllm.lora.utils import is_base_embedding_weights
from vllm.lora.worker_manager import WorkerLoRAManager

from loco.sync import Subscriber

logger = logging.getLogger(__name__)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Loaded(NamedTuple):
    """A version in host memory, packed as the engine has it."""

    version: int  # -1: as it was in its folder
    lora: LoRAModel


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
        self._slots = _Slots.of(model, sleeps=vllm_config.model_config.enable_sleep_mode)
        manager = self._slots.manager
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"adapter {number}: there is no {WEIGHTS} in {folder}")
        self._number, self._config = number, (folder / CONFIG).read_bytes()
        self._loader = WorkerLoRAManager(vllm_config, manager.device, getattr(model, "embedding_modules", {}))
        self._loader._adapter_manager = manager
        # A copy: the file may be written again.
        self._tensors = {
            name: one.to(torch.float16 if one.dtype == torch.float16 else torch.bfloat16, copy=True)
            for name, one in load_file(folder / WEIGHTS).items()
            if not is_base_embedding_weights(name)
        }
        self._subscriber = follow(self._tensors)
        self._subscriber.check()
        lora = self._load()
        if lora.modules_to_save:
            raise ValueError(f"adapter {number} has modules that are saved whole, which can't be followed")
        self._slots.take(number, lora)
        self._before = self._slots.followed[number]
        self._past: Loaded | None = None

    @property
    def version(self) -> int:
        """That requests see."""
        return self._slots.followed[self._number].version

    def prepare(self, version: int | None = None) -> Loaded:
        """Load a version, by default the newest. No request sees anything of it."""
        self._past = None  # here, since giving large memory back takes as long as the rest of `apply`
        found = self._subscriber.update(version)
        lora = self._load()
        self._slots.pack(lora)
        loaded = Loaded(found.version, lora)
        self._slots.write_ahead(self._number, loaded)
        return loaded

    def apply(self, loaded: Loaded) -> None:
        """Between two steps of the engine: from now on requests see this version. If this fails, they see
        what they saw."""
        past, before = self._before, self._slots.followed[self._number]
        try:
            self._before = before
            self._slots.change(self._number, loaded)
        except BaseException:
            self._before = past
            self._put_back(before)
            raise
        self._past = past

    def rollback(self) -> None:
        """As before the last `apply`."""
        self._put_back(self._before)

    def _put_back(self, before: Loaded) -> None:
        while True:
            try:
                return self._slots.change(self._number, before)
            except KeyboardInterrupt:  # half of a version is none
                continue
            except Exception as error:
                text = f"adapter {self._number} can't be put back, and is written half: end the engine"
                raise RuntimeError(text) from error

    def leave(self) -> None:
        """Follow nobody. The adapter stays until vLLM drops it, and is then loaded from its folder."""
        self._slots.give_back(self._number)

    def _load(self) -> LoRAModel:
        with tempfile.TemporaryDirectory(prefix="loco-adapter-") as folder:
            (Path(folder) / CONFIG).write_bytes(self._config)
            save_file(self._tensors, Path(folder) / WEIGHTS)
            return self._loader._load_adapter(LoRARequest(str(self._number), self._number, folder))


class _Slots:
    """The followed adapters among all of an engine.

    vLLM keeps adapters in host memory, and copies of those in use in the slots of its kernels; it drops what
    it needs room for. Followed ones stay in host memory, so that a slot always gets the version that was
    applied last, and none is read from its folder again. Slots are vLLM's to give; it knows a second one by
    the adapter's negative number.

    Attributes:
        followed: by number, the version that requests see.
        _ahead: by number, what was written into its second slot; None: part of something.
    """

    def __init__(self, manager: Any, sleeps: bool) -> None:
        self.manager = manager
        self.followed: dict[int, Loaded] = {}
        self._ahead: dict[int, Loaded | None] = {}
        self._told: set[int] = set()
        self._writing = threading.RLock()  # into a spare slot, which vLLM may want meanwhile
        # The memory of slots comes and goes then.
        self._sleeps = sleeps
        self._free, self._drop_all = manager._active_adapters.deactivate_fn, manager.remove_all_adapters
        self._remove = manager.remove_adapter
        manager._active_adapters.deactivate_fn = self._freed
        manager.remove_all_adapters, manager.remove_adapter = self._drop_others, self._remove_other

    @classmethod
    def of(cls, model: nn.Module, sleeps: bool) -> "_Slots":
        """The one of an engine.

        Raises:
            ValueError: it serves no adapters.
        """
        manager: Any = getattr(model, "lora_manager", None)
        if not isinstance(manager, LoRAModelManager):
            raise ValueError("adapters can't follow publishers: the engine was started without enable_lora")
        kept = vars(manager)
        if "loco_slots" not in kept:
            kept["loco_slots"] = cls(manager, sleeps)
        return kept["loco_slots"]

    def take(self, number: int, lora: LoRAModel) -> None:
        """Keep an adapter in host memory: this one, unless the engine has one of that number."""
        manager = self.manager
        needed = manager.lora_slots + len(self.followed) + 1
        if manager.capacity < needed:
            raise ValueError(
                f"max_cpu_loras must be at least {needed}, as adapter {number} stays in host memory beside "
                f"max_loras={manager.lora_slots} others while it follows its publisher; it is "
                f"{manager.capacity}"
            )
        if number not in manager._registered_adapters:
            manager.add_adapter(lora)
        self._keep(number, Loaded(-1, manager._registered_adapters[number]))
        self._reserve(number)

    def pack(self, lora: LoRAModel) -> None:
        self.manager._create_merged_loras_inplace(lora)

    def write_ahead(self, number: int, loaded: Loaded) -> None:
        """In the thread that fetches: into the second slot, if there is one."""
        slots = self.manager.lora_index_to_id
        with self._writing:
            if number in self._ahead and -number in slots:
                self._ahead[number] = None
                self._write(slots.index(-number), loaded.lora)
                if self.manager.device.type != "cpu":
                    torch.accelerator.current_stream().synchronize()
                self._ahead[number] = loaded

    def change(self, number: int, loaded: Loaded) -> None:
        """What requests see. Where this ends before its time, it can be called again, with any version."""
        slots, behind = self.manager.lora_index_to_id, None
        with self._writing:
            if number not in slots:  # it is written when it is asked for
                self.manager._active_adapters.pop(-number, None)
            elif self._ahead.get(number) is loaded:
                self._ahead[number], behind = None, self.followed[number]
                used = slots.index(number)
                slots[slots.index(-number)], slots[used] = number, -number
            else:
                self._write(slots.index(number), loaded.lora)
            self._keep(number, loaded)
            self._reserve(number)
            if behind is not None:
                self._ahead[number] = behind

    def give_back(self, number: int) -> None:
        manager = self.manager
        manager._active_adapters.pop(-number, None)
        del self.followed[number]
        if number in manager._registered_adapters.pinned_items:
            manager._registered_adapters._unpin(number)

    def _keep(self, number: int, loaded: Loaded) -> None:
        self.manager._registered_adapters[number] = loaded.lora
        self.manager._registered_adapters.pin(number)
        self.followed[number] = loaded

    def _reserve(self, number: int) -> None:
        """A second slot, if one is free. What of this was interrupted is done again."""
        slots = self.manager.lora_index_to_id
        if -number in slots:
            if -number in self.manager._active_adapters and number in self._ahead:
                return
            slot = slots.index(-number)
        elif slots.count(None) >= (1 if number in slots else 2) and not self._sleeps:
            slot = slots.index(None)  # another one is for the adapter itself
        else:
            return
        self._ahead[number] = None
        self._hold(-number, slot)

    def _hold(self, number: int, slot: int) -> None:
        self.manager._active_adapters[number] = None
        self.manager.lora_index_to_id[slot] = number

    def _write(self, slot: int, lora: LoRAModel) -> None:
        """As vLLM does when it activates an adapter."""
        for name, module in self.manager.modules.items():
            weights = self.manager._get_lora_layer_weights(lora, name)
            if weights is None:
                module.reset_lora(slot)
            else:
                module.set_lora(slot, weights.lora_a, weights.lora_b)

    def _freed(self, number: int) -> None:
        """vLLM takes a slot back."""
        if number > 0:
            self._free(number)
            return
        with self._writing:
            self._ahead.pop(-number, None)
            self._free(number)

    def _drop_others(self) -> None:
        """vLLM drops all adapters, as after every update of weights."""
        with self._writing:
            ahead = dict(self._ahead)
            slots = {} if self._sleeps else {n: k for k, n in enumerate(self.manager.lora_index_to_id) if n}
            self._drop_all()
            for number, loaded in list(self.followed.items()):
                self._keep(number, loaded)
                for one in (number, -number):
                    if one in slots:
                        self._hold(one, slots[one])
                if -number in slots:
                    self._ahead[number] = ahead.get(number)

    def _remove_other(self, number: int) -> bool:
        if number not in self.followed:
            return self._remove(number)
        if number not in self._told:
            text = "adapter %d follows its publisher, and is neither removed nor loaded from its folder"
            logger.warning(text, number)
            self._told.add(number)
        return False
