"""`python -m loco sync ls | stat | verify | export | pull`: a store of published weights, as one sees it."""

from pathlib import Path

import pytest
import torch
from published import cast
from safetensors.torch import load_file
from torch import Tensor

from loco.commands.sync import main
from loco.sync import Publisher, Subscriber

KEY = b"sixteen bytes or more"


@pytest.fixture
def weights(generator: torch.Generator) -> dict[str, Tensor]:
    return {"matrix": torch.randn(300, 20, generator=generator), "count": torch.arange(5)}


def published(weights: dict[str, Tensor], url: Path, versions: int, key: bytes | None = None) -> None:
    """By two publishers, of which each has a part."""
    both = [Publisher(weights, url, stream=(k, 2), key=key) for k in range(2)]
    for version in range(1, versions + 1):
        for publisher in both:
            publisher.publish(version)
        weights["matrix"][version] += 1.0
        weights["count"] += 1
    weights["matrix"][versions] -= 1.0  # what was published last
    weights["count"] -= 1


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def store(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    published(weights, tmp_path / "store", 3)
    return tmp_path / "store"


def test_ls_has_a_line_for_each_version(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(store)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("version 1: anchor, ")
    assert first.endswith(" bytes, by 2 publishers")
    for line in (second, third):
        assert ": patch, " in line
        assert "25 elements changed, by 2 publishers" in line  # a row, and bytes of integers


def test_stat_says_what_a_store_holds(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", str(store)]) == 0
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    size = sum(path.stat().st_size for path in (store / "weights").iterdir())
    assert found["versions"].strip() == "3, from 1 to 3"
    assert found["anchors"].strip() == "1"
    assert found["bytes"].strip() == f"{size:,}"
    assert found["weights"].strip() == "2 tensors of 6,005 elements"


def test_verify_reads_all_and_names_what_is_damaged(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(store)]) == 0
    assert capsys.readouterr().out.endswith("all is what was published\n")
    (damaged, *_) = (store / "weights").glob("000000000002.0-of-2.*")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert main(["verify", str(store)]) == 1
    said = capsys.readouterr()
    assert f"weights/{damaged.name} is damaged: its SHA-256 is not what its publisher says" in said.err
    assert "are damaged" in said.out


def test_export_writes_a_version_bit_for_bit(store: Path, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    file = tmp_path / "model.safetensors"
    assert main(["export", str(store), str(file)]) == 0
    found = load_file(file)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name].view(torch.uint8), cast(tensor).view(torch.uint8))
    assert main(["export", str(store), str(file), "--version", "1"]) == 0
    assert not torch.equal(load_file(file)["count"], weights["count"])


def test_pull_copies_what_is_missing_and_the_copy_is_followed(
    store: Path, tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    files = [path for folder in ("layouts", "weights", "versions") for path in (store / folder).iterdir()]
    assert main(["pull", str(store), str(copy)]) == 0
    assert capsys.readouterr().out.endswith(f"{len(files)} files are new in {copy}\n")
    assert main(["pull", str(store), str(copy)]) == 0
    assert capsys.readouterr().out == f"0 files are new in {copy}\n"
    engine = {name: torch.zeros_like(cast(tensor)) for name, tensor in weights.items()}
    assert Subscriber(engine, copy).update().version == 3
    assert main(["verify", str(copy)]) == 0


def test_pull_mixes_no_two_trainings(
    store: Path, tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    published(weights, other, 1)
    assert main(["pull", str(store), str(other)]) == 2
    assert "holds the versions of another training: take another folder" in capsys.readouterr().err


def test_sealed_versions_need_the_key(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    published(weights, tmp_path / "store", 2, KEY)
    key = tmp_path / "key"
    key.write_bytes(KEY)
    assert main(["verify", str(tmp_path / "store"), "--key-file", str(key)]) == 0
    assert main(["ls", str(tmp_path / "store")]) == 2
    assert "is sealed with a key, and none was given" in capsys.readouterr().err


def test_an_empty_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ls"], ["stat"], ["verify"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "has no version: nothing is published there" in capsys.readouterr().err
