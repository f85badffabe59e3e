"""The weights of a running vLLM under the names and in the shapes of its checkpoint."""

import json
import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig

from .engine_weights import EngineSlice, first_difference, joined, learn, require_whole

logger = logging.getLogger(__name__)
Weights = dict[str, Tensor | list[EngineSlice]]


def weights_of(model: nn.Module, vllm_config: VllmConfig) -> Weights:
    """A view of the engine's memory for each tensor of its checkpoint; of one in parts, their places.

    Raises:
        ValueError: the engine keeps some weight in another form than the checkpoint, or a second time.
    """
    config = vllm_config.model_config
    if config.quantization is not None:
        raise ValueError(f"the engine's weights are quantized ({config.quantization}), those sent are not")
    checkpoint = checkpoint_of(vllm_config)
    places = learn(model, checkpoint)
    if vllm_config.parallel_config.world_size_across_dp == 1:
        left_out = [name for name, pieces in places.items() if not pieces]
        if left_out:
            logger.warning("%d tensors of the checkpoint are not loaded: %s", len(left_out), left_out)
        for name in left_out:
            del places[name], checkpoint[name]
        require_whole(places, checkpoint)
    if name := second_copy(model):
        raise ValueError(f"{name} seems to be computed from weights, and would not change with them")
    was_loaded = vllm_config.load_config.load_format != "dummy"
    if was_loaded and (name := first_difference(places, checkpoint)):
        raise ValueError(f"{name} was rearranged or changed after the engine had loaded it")
    return joined(places, checkpoint)


def checkpoint_of(vllm_config: VllmConfig) -> dict[str, Tensor]:
    """The tensors of the engine's own checkpoint, mapped from its files: only what is looked at is read."""
    config = vllm_config.model_config
    folder = Path(config.model)
    if not folder.is_dir():
        cache = vllm_config.load_config.download_dir
        options = {"revision": config.revision, "cache_dir": cache, "allow_patterns": "*.safetensors*"}
        folder = Path(snapshot_download(config.model, local_files_only=True, **options))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    else:
        files = set(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}
    if not tensors:
        raise ValueError(f"no *.safetensors in {folder}")
    return tensors


def second_copy(model: nn.Module) -> str | None:
    """A tensor of a layer that is neither a weight nor a buffer, such as MLA's absorbed projections."""
    known = {_address(one) for one in (*model.parameters(), *model.buffers())}
    for layer, module in model.named_modules():
        for name, value in vars(module).items():
            is_weight = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
            if is_weight and name != "kv_cache" and _address(value) not in known:
                return f"{layer}.{name}"
    return None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
