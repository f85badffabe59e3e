"""The frameworks are those that requirements-integrations.txt pins."""

import re
from importlib.metadata import distributions, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements-integrations.txt"


def test_the_frameworks_are_the_pinned_ones_and_bring_no_other_torch() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE))
    assert {"torch", "transformers", "trl", "accelerate", "peft", "lightning", "torchtitan"} <= set(pinned)
    assert {name: version(name).partition("+")[0] for name in pinned} == pinned
    installed = {found.metadata["Name"].lower() for found in distributions()}
    unwanted = {
        name for name in installed if name.startswith("nvidia") or name in ("torchvision", "torchaudio")
    }
    assert not unwanted
