"""An engine of two ranks, run by test_two_ranks.py: `two_ranks.py FOLDER OPTIONS CHECKPOINT [VERSION …]`.

It is built on a checkpoint and becomes each version in turn, with an adapter whose versions are 10 more if
its options have room for adapters. Of what it is at first and after each it prints a line of JSON.
"""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from adapters import in_slot
from plain_engine import build, generate
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest


def digests(model: Any) -> dict[str, str]:
    """Of this rank's parameters, and of what lies in the slot of adapter 1."""
    found = dict(model.named_parameters()) | (in_slot(model, 1) if hasattr(model, "lora_manager") else {})
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in found.items()
    }


def main(folder: Path, options: dict[str, Any], checkpoint: str, versions: list[int]) -> None:
    config = WeightTransferConfig(backend="loco")
    engine = build(folder / checkpoint, weight_transfer_config=config, **options)
    served = folder / f"adapter-{10 + int(checkpoint)}"
    asked = [LoRARequest("adapter", 1, str(served))] if "enable_lora" in options else []
    adapters = {
        str(one.lora_int_id): {"url": str(folder / "url of adapter"), "folder": str(served)} for one in asked
    }
    # vLLM 0.32 for CPUs can't generate in stages: it makes room for what they hand on when it profiles.
    can_generate = "pipeline_parallel_size" not in options

    def tell(error: str = "") -> None:
        generated = [generate(engine, adapter=one) for one in (None, *asked) if can_generate]
        ranks = engine.apply_model(digests)
        print(json.dumps({"ranks": ranks, "generated": generated, "error": error}), flush=True)

    tell()
    if versions:
        engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url"), "adapters": adapters}})
    for version in versions:
        tell(update(engine, version, dict.fromkeys(adapters, 10 + version)))


def update(engine: LLM, version: int, adapters: dict[str, int]) -> str:
    """-> the error, if it fails"""
    error = ""
    engine.start_weight_update()
    try:
        engine.update_weights({"update_info": {"version": version, "adapters": adapters}})
        engine.finish_weight_update()
    except RuntimeError as failed:
        error = str(failed)
        with suppress(RuntimeError):
            engine.finish_weight_update()
    engine.reset_prefix_cache()
    return error


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], [int(version) for version in sys.argv[4:]])
