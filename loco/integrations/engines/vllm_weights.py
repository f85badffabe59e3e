"""The weights of a running vLLM under the names and in the shapes of its checkpoint."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from .engine_weights import EngineSlice, first_difference, joined, learn, require_whole

logger = logging.getLogger(__name__)
Weights = dict[str, Tensor | list[EngineSlice]]


def weights_of(model: nn.Module, vllm_config: VllmConfig) -> Weights:
    """A view of the engine's memory for each tensor of its checkpoint; of one in parts, their places.

    Raises:
        ValueError: the engine keeps some weight in another form than the checkpoint, or a second time.
    """
    was_loaded = vllm_config.load_config.load_format != "dummy"
    kind = vllm_config.model_config.quantization
    if kind is not None and not was_loaded:
        raise ValueError(f"of weights that are quantized ({kind}) the checkpoint must be loaded, to compare")
    checkpoint = checkpoint_of(vllm_config)
    places = learn(model, checkpoint) if kind is None else _learn_quantized(model, checkpoint)
    if vllm_config.parallel_config.world_size_across_dp == 1:
        left_out = [name for name, pieces in places.items() if not pieces]
        if left_out:
            logger.warning("%d tensors of the checkpoint are not loaded: %s", len(left_out), left_out)
        for name in left_out:
            del places[name], checkpoint[name]
        require_whole(places, checkpoint)
    if name := second_copy(model):
        raise ValueError(f"{name} seems to be computed from weights, and would not change with them")
    if was_loaded and (name := first_difference(places, checkpoint)):
        raise ValueError(f"{name} was rearranged or changed after the engine had loaded it")
    return joined(places, checkpoint)


def _learn_quantized(model: nn.Module, checkpoint: dict[str, Tensor]) -> dict[str, list[EngineSlice]]:
    """As `learn`, of a model on whose weights vLLM has worked after loading: it has lost their loaders then.

    They are kept with meta tensors of what was loaded, for vLLM's own reloading. What is learned there holds
    of a weight that has kept its form.

    Raises:
        ValueError: one has another form now.
    """
    live = {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())}
    with _as_when_it_was_loaded(model):
        spare = {name for name, _ in model.named_parameters() if name not in live}  # vLLM has let go of them
        places = learn(model, checkpoint, spare=spare)
        loaded = {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())}
        names = {one.untyped_storage()._cdata: name for name, one in loaded.items()}
        homes = {name: [names[p.view.untyped_storage()._cdata] for p in of] for name, of in places.items()}
    computed = set().union(*(_of_their_own(layer) for layer in layers_that_compute(model)))
    memory = {live[name].untyped_storage()._cdata for name in loaded.keys() & live.keys()}
    for name, one in model.named_parameters():
        if one not in computed and one.untyped_storage()._cdata not in memory:
            raise ValueError(f"{name} is computed from weights, and would not change with them")
    for name in {home for of in homes.values() for home in of}:
        one = loaded[name]
        if name not in live or _form(live[name]) != _form(one):
            raise ValueError(
                f"{name} was loaded as {list(one.shape)} of {one.dtype}, and is kept in another form: vLLM "
                f"has packed or rearranged it, and no change can be written there"
            )
    return {
        name: [_moved(piece, loaded[home], live[home]) for piece, home in zip(of, homes[name], strict=True)]
        for name, of in places.items()
    }


def layers_that_compute(model: nn.Module) -> list[MLAAttention]:
    """Those that keep what they have computed from a weight, and compute it again when they are asked: MLA's
    absorbed projections, from a kv_b_proj that is quantized."""
    return [one for one in model.modules() if isinstance(one, MLAAttention) and _of_their_own(one)]


def _of_their_own(layer: MLAAttention) -> set[nn.Parameter]:
    """The parameters that are not views of kv_b_proj's."""
    known = {_address(one) for one in layer.kv_b_proj.parameters()}
    return {one for one in layer.parameters(recurse=False) if _address(one) not in known}


def _form(tensor: Tensor) -> tuple[object, ...]:
    """How its elements lie in memory: a transposed view has the same."""
    return sorted(zip(tensor.shape, tensor.stride(), strict=True)), tensor.dtype


def _moved(piece: EngineSlice, loaded: Tensor, live: Tensor) -> EngineSlice:
    """The same place in a tensor of the same form."""
    offset = piece.view.storage_offset() - loaded.storage_offset() + live.storage_offset()
    return EngineSlice(piece.region, live.as_strided(piece.view.shape, piece.view.stride(), offset))


@contextmanager
def _as_when_it_was_loaded(model: nn.Module) -> Iterator[None]:
    """With the meta tensors, and their loaders, that vLLM keeps for its own reloading."""
    layers = list(model.modules())
    kept = [
        (dict(one._parameters), dict(one._buffers), set(one._non_persistent_buffers_set)) for one in layers
    ]
    shared = dict[int, nn.Parameter]()  # tied weights stay tied
    try:
        for layer, (parameters, _, _) in zip(layers, kept, strict=True):
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, one in parameters.items():
                restored = layer._parameters.get(name)
                if one is not None and restored is not None:
                    layer._parameters[name] = shared.setdefault(id(one), restored)
        yield
    finally:
        for layer, (parameters, buffers, not_saved) in zip(layers, kept, strict=True):
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(not_saved)


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
            if "lora_" in name and isinstance(module, BaseLayerWithLoRA):
                continue  # an adapter's
            is_weight = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
            if is_weight and name != "kv_cache" and _address(value) not in known:
                return f"{layer}.{name}"
    return None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
