"""An engine of two ranks, run by test_two_ranks.py: `two_ranks.py FOLDER CHECKPOINT [VERSION …]`.

It is built on a checkpoint and becomes each version in turn, with an adapter whose versions are 10 more; of
each it prints a line of JSON.
"""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from adapters import SLOTS, in_slot
from plain_engine import build, generate
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest


def digests(model: Any) -> dict[str, str]:
    """Of this rank's parameters, and of what lies in the slot of adapter 1."""
    found = dict(model.named_parameters()) | in_slot(model, 1)
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
        for name, tensor in found.items()
    }


def main(folder: Path, checkpoint: str, versions: list[int]) -> None:
    config = WeightTransferConfig(backend="loco")
    engine = build(folder / checkpoint, tensor_parallel_size=2, weight_transfer_config=config, **SLOTS)
    served = folder / f"adapter-{10 + int(checkpoint)}"
    adapters = {"1": {"url": str(folder / "url of adapter"), "folder": str(served)}}
    if versions:
        engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url"), "adapters": adapters}})
    for version in versions or [None]:
        error = "" if version is None else update(engine, version)
        generated = generate(engine), generate(engine, adapter=LoRARequest("adapter", 1, str(served)))
        ranks = engine.apply_model(digests)
        print(json.dumps({"ranks": ranks, "generated": generated, "error": error}), flush=True)


def update(engine: LLM, version: int) -> str:
    """-> the error, if it fails"""
    error = ""
    engine.start_weight_update()
    try:
        engine.update_weights({"update_info": {"version": version, "adapters": {"1": 10 + version}}})
        engine.finish_weight_update()
    except RuntimeError as failed:
        error = str(failed)
        with suppress(RuntimeError):
            engine.finish_weight_update()
    engine.reset_prefix_cache()
    return error


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(version) for version in sys.argv[3:]])
