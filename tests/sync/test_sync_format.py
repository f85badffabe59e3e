"""A reader that does what docs/sync-format.md says, and shares no code, reads what publishers write."""

from pathlib import Path

import independent_patch_decoder
import numpy as np
import pytest
import torch
from independent_patch_decoder import Coded, decode_anchor, decode_patch, digest_of
from independent_store import Store, Weights, contents
from pages import page, table
from patch_cases import any_bits, moved, of_bits, trained
from selection import ALL_VALUES
from torch import Tensor

from loco import kernels
from loco.kernels import FORMATS, reference, reference_patch
from loco.sync import Publisher
from loco.sync.versions.anchors import pack_anchor
from loco.sync.versions.vectors import combined

KEY = b"sixteen bytes or more"
Named = dict[str, Tensor]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> bytes:
    """The elements in row-major order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def numbers_of(tensor: Tensor) -> list[int]:
    return reference_patch.unsigned(reference_patch.bits_of(tensor)).tolist()


# ---- stores that publishers have written ----


def model(rng: np.random.Generator) -> Named:
    """Tensors of every format and of none, in several shapes, some of them not in a row."""
    held = {names(dtype): trained(600, dtype, rng).view(30, 20) for dtype in FORMATS}
    held["any bits"] = any_bits(333, torch.bfloat16, rng)
    held["turned"] = trained(240, torch.bfloat16, rng).view(12, 20).t()
    held["apart"] = trained(40, torch.float32, rng)[::2]
    held["counter"] = torch.tensor(7)
    held["mask"] = torch.zeros(3, 5, dtype=torch.bool)
    held["doubles"] = torch.zeros(9, dtype=torch.float64)
    held["nothing"] = torch.empty(0, 4)
    held["the same again"] = held["bfloat16"]
    return held


def train(held: Named, rng: np.random.Generator) -> None:
    """A step: few weights move, most of them a little, and a counter counts."""
    for name, tensor in held.items():
        if tensor.dtype in FORMATS and name != "nothing":
            longest = 20 if tensor.dtype == torch.float32 else 2
            tensor.copy_(moved(tensor.flatten(), 0.02, longest, rng).view(tensor.shape))
    held["counter"] += 1
    held["mask"][0, 1:3].logical_not_()
    held["doubles"][4] += 0.1


def as_published(held: Named, dtype: torch.dtype) -> dict[str, bytes]:
    """By the first name of each tensor."""
    found: dict[str, bytes] = {}
    for name, tensor in held.items():
        if name != "the same again":
            cast = reference.cast(tensor.contiguous(), dtype) if tensor.dtype == torch.float32 else tensor
            found[name] = bytes_of(cast)
    return found


def read(store: Store) -> dict[int, dict[str, bytes]]:
    """The tensors of all versions, by each file that leads to one; all files must agree."""
    found: dict[int, dict[str, bytes]] = {}
    weights: dict[tuple[int, int], Weights] = {}
    for version in store.versions():
        pieces: dict[str, list[tuple[int, bytes]]] = {}
        for manifest in store.manifests(version):
            made: list[Weights] = []
            for file in manifest["files"]:
                base = None if file["base"] is None else weights[file["base"], manifest["index"]]
                made.append(store.follow(manifest, file, base))
            assert made
            assert made == made[:1] * len(made)
            weights[version, manifest["index"]] = made[0]
            for entry, content in contents(store.layout(manifest), made[0]):
                pieces.setdefault(entry.name, []).append((entry.start, content))
        found[version] = {name: b"".join(some for _, some in sorted(of)) for name, of in pieces.items()}
    return found


def steps_back(store: Store) -> set[int | None]:
    """Over how many versions patches lead; None for an anchor."""
    return {
        None if file["base"] is None else version - file["base"]
        for version in store.versions()
        for manifest in store.manifests(version)
        for file in manifest["files"]
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=names)
def test_every_file_leads_to_the_weights_that_the_publisher_had(tmp_path: Path, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    held, expected = model(rng), dict[int, dict[str, bytes]]()
    with Publisher(held, tmp_path, dtype=dtype, anchor_every=5, skips=10.0) as publisher:
        for version in range(1, 10):
            publisher.publish()
            expected[version] = as_published(held, dtype)
            train(held, rng)
    store = Store(tmp_path)
    assert read(store) == expected
    assert steps_back(store) == {None, 1, 8}


def test_three_publishers_that_share_the_work_and_a_key(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    held, expected = model(rng), dict[int, dict[str, bytes]]()
    publishers = [Publisher(held, tmp_path, stream=(k, 3), key=KEY) for k in range(3)]
    for version in (7, 8, 20):
        for publisher in publishers:
            publisher.publish(version)
        expected[version] = as_published(held, torch.bfloat16)
        train(held, rng)
    for publisher in publishers:
        publisher.close()
    store = Store(tmp_path, KEY)
    # What is divided has its parts in several layouts, and what is empty is in none.
    assert read(store) == {v: {n: b for n, b in of.items() if b} for v, of in expected.items()}
    assert steps_back(store) == {None, 1, 12}
    for wrong in (None, b"another key of some length"):
        with pytest.raises(ValueError, match="must have its seal"):
            Store(tmp_path, wrong).manifests(7)


@pytest.mark.check(ALL_VALUES)
def test_vectors_of_several_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    n = kernels.PART + 1003
    held = {"bytes": trained(n, torch.uint8, rng), "halves": trained(n, torch.bfloat16, rng)}
    expected = dict[int, dict[str, bytes]]()
    with Publisher(held, tmp_path) as publisher:
        for version in (1, 2):
            publisher.publish()
            expected[version] = {name: bytes_of(tensor) for name, tensor in held.items()}
            for tensor in held.values():
                tensor.copy_(moved(tensor, 0.01, 3, rng))
    assert read(Store(tmp_path)) == expected


# ---- the example of the text ----


def example(text: str) -> bytes:
    """What stands in lines of hexadecimal digits, before what is said of them."""
    lines = [line[4:].partition("   ")[0] for line in text.splitlines() if line.startswith("    ")]
    return bytes.fromhex("".join(lines))


def test_the_example_is_what_it_says() -> None:
    text = page("docs/sync-format.md").partition("### Example\n")[2]
    rows = {row[0]: row[1:] for row in table(text, "| element |")}
    old, new = ([int(bits, 16) for bits in rows[which]] for which in ("old", "new"))
    before, after = (of_bits(np.array(bits), torch.bfloat16) for bits in (old, new))
    anchor = b"".join(pack_anchor(before))
    patch = kernels.pack_patch([before], kernels.find_changes([before], [after])).numpy().tobytes()
    assert example(text) == anchor + patch
    assert decode_anchor(anchor, 4, "bfloat16") == old
    changes = {i: bits for i, (bits, was) in enumerate(zip(new, old, strict=True)) if bits != was}
    assert dict(decode_patch(patch, old, "bfloat16")) == changes
    for weights in (old, new):
        digest = digest_of(weights)
        assert f"{digest:016x}" in text
        assert combined([digest]) in text


def test_the_decisions_of_the_example() -> None:
    text = page("docs/sync-format.md").partition("### Example\n")[2]
    coded = Coded(example(text)[-2:])
    changes = list(independent_patch_decoder.read_gaps_and_steps(coded, [0] * 15 + [2]))
    assert changes == [(15, 1, -1), (15, 2, 2)]
    rows = table(text, "| decision |")
    said = [(int(chance), *(int(x, 16) for x in numbers), int(last[0])) for _, chance, *numbers, last in rows]
    assert said == coded.decisions
