"""How long a vLLM that generates must stop to take new weights, 1% of which have changed.

    make vllm
    .venv-vllm/bin/python -m experiments.bench sync --only engine

An engine in this process, on a CPU, keeps its weights as they were loaded (as a GPU does), and generates for
one request. In each turn a new version is published and comes by the backend "loco", between two requests:

- `start_weight_update` begins to fetch and decode it, and returns; the engine generates meanwhile.
- `update_weights`, when the version is there, is the pause: of it `apply()` writes, and the rest is vLLM's
  way to its worker.

`swap`, the scatter alone, and a copy of the same number of weights take turns with these, in memory of their
own. A scatter is judged as in `bench sync --only speed`: by the cache lines that it touches, there and back,
and its changes. What it all costs is also said in tokens: how many the engine would have generated meanwhile.
After each turn every weight in the engine is compared with the trainer's, bit for bit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from experiments.bench.measuring import CPU, Row, Table, quantiles
from experiments.bench.sync.speed import TILE, WHOLE, scattered_bytes
from experiments.bench.sync.traces import ONE_PERCENT, ROW, Model, flat, noise_versions, same_bits
from experiments.processes.progress import Progress
from loco import kernels
from loco.sync import Prepared, Publisher, Updated

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")
REPEATS, TOKENS = 15, 32
LLAMA: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
LLAMA |= {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 8192}
QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
QUICK |= {"num_attention_heads": 4, "num_key_value_heads": 4}
COPY, SWAP, APPLY, PAUSE = "copy", "swap", "apply()", "update_weights"
START, FETCH, FINISH = "start_weight_update", "fetch and decode", "finish_weight_update"
TOKEN, TOKEN_MEANWHILE = "a token", "a token, while it fetches"
_SCATTERS = (SWAP, APPLY, PAUSE)
_WITHOUT = """\
there is no vLLM here, so the pause of a running engine is left out. It has an environment of its own:
    make vllm
    .venv-vllm/bin/python -m experiments.bench sync --only engine"""
SHOWN = {"numel": ">11,", "density": ">8.2%", "work": "<26", "least": ">8.4f", "p50": ">8.4f", "p80": ">8.4f"}
SHOWN |= {"moved_bytes": ">12,.0f", "share_of_copy": ">13.1%", "tokens": ">8.2f"}


def measure(out: Path, run: Row, *, quick: bool) -> None:
    if find_spec("vllm") is None:
        print(_WITHOUT)
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    table = Table(out / "sync_engine.csv", CPU, SHOWN)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), LLAMA | QUICK if quick else LLAMA, 2 if quick else REPEATS)
        table.add([run | row for row in rows_of(trainer)])
    table.close()


class Trainer:
    """Publishes versions of a Llama, the first of which is a checkpoint, too. Weights are noise."""

    def __init__(self, folder: Path, sizes: dict[str, Any], repeats: int) -> None:
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], max_position_embeddings=1024)
        with torch.device("meta"):
            shapes = {name: one.shape for name, one in LlamaForCausalLM(config).state_dict().items()}
        numels = [shape.numel() for shape in shapes.values()]
        versions = noise_versions(min(TILE, sum(numels) // ROW // 16 * ROW), ONE_PERCENT, count=repeats + 2)
        self._tile = [flat(version) for version in versions]
        self.model, self.repeats = Model(sum(numels), self._tile), repeats
        parts = self.model.whole.split(numels)
        self.tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self.checkpoint, self.url = folder / "checkpoint", folder / "weights"
        config.save_pretrained(self.checkpoint)
        save_file(self.tensors, self.checkpoint / "model.safetensors", metadata={"format": "pt"})
        self._publisher = Publisher(self.tensors, self.url)
        self._publisher.publish()

    def held(self) -> Model:
        """A copy of the first version."""
        return Model(self.model.whole.numel(), self._tile)

    def publish(self, version: int) -> None:
        self.model.show(version)
        self._publisher.publish()


def rows_of(trainer: Trainer) -> list[Row]:
    held, numel = trainer.held(), trainer.model.whole.numel()
    target, took = torch.empty_like(held.whole), dict[str, list[float]]()

    def timed(name: str, call: Callable[[], T]) -> T:
        begun = time.perf_counter()
        found = call()
        took.setdefault(name, []).append(time.perf_counter() - begun)
        return found

    changes, engine = None, build(trainer.checkpoint)
    engine.init_weight_transfer_engine({"init_info": {"url": str(trainer.url)}})
    (transfer,) = engine.collective_rpc(lambda worker: worker.weight_transfer_engine)
    apply = transfer.subscriber.apply

    def timed_apply(prepared: Prepared) -> Updated:
        return timed(APPLY, lambda: apply(prepared))

    transfer.subscriber.apply = timed_apply
    with Progress("engine", total=trainer.repeats + 1) as progress:
        for turn in range(trainer.repeats + 1):
            trainer.publish(turn + 1)
            changes = kernels.find_changes(held.pieces, trainer.model.pieces)
            timed(TOKEN, lambda: generate(engine))
            timed(START, engine.start_weight_update)
            fetching = transfer._fetching
            timed(TOKEN_MEANWHILE, lambda: generate(engine))
            took.setdefault(FETCH, []).append(fetching.result().seconds)
            timed(COPY, lambda: target.copy_(held.whole))
            timed(SWAP, lambda found=changes: kernels.swap_bits(held.pieces, found))
            timed(PAUSE, lambda: engine.update_weights({"update_info": {}}))
            timed(FINISH, lambda version=turn: engine.finish_weight_update(str(version)))
            engine.reset_prefix_cache()
            check(held.pieces, trainer.model.pieces)
            check([transfer._weights[name] for name in trainer.tensors], trainer.tensors.values())
            progress.advance()
    engine.llm_engine.engine_core.shutdown()
    assert changes is not None
    common = {"numel": numel, "density": changes.positions.numel() / numel}
    common |= {"threads": torch.get_num_threads(), "repeats": trainer.repeats}
    took = {name: some[1:] for name, some in took.items()}  # the first warms caches and pages up
    for name in (TOKEN, TOKEN_MEANWHILE):
        took[name] = [seconds / TOKENS for seconds in took[name]]
    return [common | row for row in shares(took, numel, scattered_bytes(changes))]


def shares(took: dict[str, list[float]], numel: int, scattered: float) -> list[Row]:
    """A row for each kind of work: seconds, tokens, and where bytes must be moved the share of a copy."""
    copy_rate, token = WHOLE * numel / median(took[COPY]), median(took[TOKEN])
    rows = []
    for name, some in took.items():
        moved = WHOLE * numel if name == COPY else scattered if name in _SCATTERS else None
        row: Row = {"work": name, "least": min(some)} | quantiles(some)
        row |= {"moved_bytes": moved, "copy_bytes_per_s": copy_rate}
        row["share_of_copy"] = moved / copy_rate / median(some) if moved else None
        rows.append(row | {"tokens": median(some) / token})
    return rows


def build(checkpoint: Path) -> LLM:
    """As tests/vllm_engine/plain_engine.py does: linear weights stay as they were loaded."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.model_executor.layers import utils

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
    return LLM(
        str(checkpoint),
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config=WeightTransferConfig(backend="loco"),
    )


def generate(engine: LLM) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    engine.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)


def check(held: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    if not same_bits(held, expected):
        raise RuntimeError("the weights that came are not those that were published")
