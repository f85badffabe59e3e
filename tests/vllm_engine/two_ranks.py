"""An engine of two ranks, run by test_two_ranks.py: `two_ranks.py FOLDER CHECKPOINT [VERSION …]`.

It is built on a checkpoint and becomes each version in turn; of each it prints a line of JSON.
"""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from plain_engine import build, generate
from vllm import LLM
from vllm.config import WeightTransferConfig


def digests(model: Any) -> dict[str, str]:
    """Of this rank's parameters."""
    return {
        name: hashlib.sha256(parameter.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def main(folder: Path, checkpoint: str, versions: list[int]) -> None:
    config = WeightTransferConfig(backend="loco")
    engine = build(folder / checkpoint, tensor_parallel_size=2, weight_transfer_config=config)
    if versions:
        engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url")}})
    for version in versions or [None]:
        error = "" if version is None else update(engine, version)
        ranks = engine.apply_model(digests)
        print(json.dumps({"ranks": ranks, "generated": generate(engine), "error": error}), flush=True)


def update(engine: LLM, version: int) -> str:
    """-> the error, if it fails"""
    error = ""
    engine.start_weight_update()
    try:
        engine.update_weights({"update_info": {"version": version}})
        engine.finish_weight_update()
    except RuntimeError as failed:
        error = str(failed)
        with suppress(RuntimeError):
            engine.finish_weight_update()
    engine.reset_prefix_cache()
    return error


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(version) for version in sys.argv[3:]])
