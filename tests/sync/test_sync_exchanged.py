"""Files that are forged, or stand in each other's place: nobody ever holds what no publisher published."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from faulty_store import (
    MemoryStore,
    Weights,
    copied,
    held_of,
    is_same,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from hypothesis import given
from hypothesis import strategies as st
from published import same_bits
from selection import SCHEDULES

import loco
from loco.sync import DamagedError, LayoutError, NoVersionError
from loco.sync.versions.layout import Layout, Region
from loco.sync.versions.manifest import Manifest, _seal
from loco.sync.weights.coverage import check_coverage

KEY = b"sixteen bytes or more"
VERSIONS = 5


def chain(seed: int, key: bytes | None, **settings: object) -> tuple[MemoryStore, list[Weights]]:
    store, trained, generator = MemoryStore(), small_weights(seed), torch.Generator().manual_seed(seed)
    publisher, were = publisher_at(store, trained, key=key, anchor_every=3, **settings), [zeros(trained)]
    for _ in range(VERSIONS):
        were.append(step(trained, generator))
        publisher.publish()
    return store, were


def update_until_told_all(store: MemoryStore, held: int, key: bytes | None, were: list[Weights]) -> int:
    """-> how many files were refused, each by name, until the newest version that can be reached was there"""
    engine = zeros(were[0])
    subscriber, refused = subscriber_at(store, engine, key=key), 0
    if held:
        for name, tensor in were[held].items():
            engine[name].copy_(tensor)
    for _ in range(30):
        before = copied(engine)
        try:
            updated = subscriber.update()
        except (DamagedError, NoVersionError, loco.AuthenticationError) as error:
            if held:  # a first update writes all weights, and can't be taken back
                same_bits(engine, before)
            assert subscriber.version is None
            refused += 1
            # Each manifest and file is refused once. Without a layout there is no way until the next anchor.
            if isinstance(error, NoVersionError) or "layouts/" in str(error):
                break
        else:
            assert any(is_same(engine, weights) for weights in were[1:])
            subscriber.verify()
            assert subscriber.version == updated.version
            break
    else:
        raise AssertionError("the same file is refused again and again")
    return refused


def exchanges(mine: dict[str, bytes], theirs: dict[str, bytes]) -> Iterator[tuple[str, bytes, str, bytes]]:
    """Every file in the place of every other one, of the same store both ways."""
    for a, b in itertools.combinations(sorted(mine), 2):
        yield a, mine[b], b, mine[a]
    for a, b in itertools.product(sorted(mine), sorted(theirs)):
        yield a, theirs[b], a, theirs[b]


@pytest.mark.check(SCHEDULES, sample=".*every 5")
@pytest.mark.parametrize("every", [5, 1], ids=lambda every: f"every {every}")
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize("same_key", [True, False], ids=["ours", "foreign"])
def test_any_file_in_the_place_of_any_other_leads_to_no_other_weights(
    key: bytes | None, same_key: bool, every: int
) -> None:
    """Also of another training, with the same key: then whole versions of it at most."""
    store, were = chain(0, key)
    theirs, other = chain(1, key if same_key else b"another key of sixteen")
    refused = 0
    legal = were + (other[1:] if same_key else [])
    for number, (a, first, b, second) in enumerate(exchanges(store.files, theirs.files)):
        if number % every:
            continue
        swapped = MemoryStore({**store.files, a: first, b: second})
        for held in (0, 1, VERSIONS - 1):
            refused += update_until_told_all(swapped, held, key, legal)
    assert refused > 10


@given(data=st.data(), key=st.sampled_from([None, KEY]))
def test_any_damage_leads_to_no_other_weights(data: st.DataObject, key: bytes | None) -> None:
    store, were = chain(0, key)
    damaged = st.lists(st.sampled_from(sorted(store.files)), min_size=1, max_size=4, unique=True)
    for path in data.draw(damaged):
        content = bytearray(store.files[path])
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        how = data.draw(st.sampled_from(["bit", "cut", "more", "gone", "empty"]))
        if how == "bit" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del content[at:]
        elif how == "more":
            content += b"?"
        elif how == "empty":
            content.clear()
        store.files[path] = bytes(content)
        if how == "gone":
            del store.files[path]
    update_until_told_all(store, data.draw(st.sampled_from([0, 1, VERSIONS - 1])), key, were)


def _with_a_point(file: dict[str, Any]) -> None:
    file["bytes"] = sum(body["bytes"] for body in file["bodies"])
    file["bodies"][0]["bytes"] += 0.0


def forgeries() -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    def file(fields: dict[str, Any]) -> dict[str, Any]:
        return fields["files"][0]

    yield "a path out of the store", lambda m: file(m).update(path="../secret")
    yield "a path of another folder", lambda m: file(m).update(path="layouts/x")
    yield "a path that is none", lambda m: file(m).update(path=7)
    yield "a base that is no number", lambda m: file(m).update(base=1.5)
    yield "a base that is true", lambda m: file(m).update(base=True)
    yield "a base below 0", lambda m: file(m).update(base=-1)
    yield "a base after it", lambda m: file(m).update(base=9)
    yield "a layout out of the store", lambda m: m.update(layout="../../x")
    yield "a layout that is none", lambda m: m.update(layout=7)
    yield "an anchor that is none", lambda m: m.update(anchor="1")
    yield "an anchor below 0", lambda m: m.update(anchor=-1)
    yield "bodies below 0", lambda m: file(m)["bodies"][0].update(bytes=-5)
    yield "a body that is none", lambda m: file(m).update(bodies=[7])
    yield "a format that is none", lambda m: file(m)["bodies"][0].update(format="Tensor")
    yield "a format that is a list of torch's", lambda m: file(m)["bodies"][0].update(format="__all__")
    yield "a format of another type", lambda m: file(m)["bodies"][0].update(format=["bfloat16"])
    yield "another format", lambda m: file(m)["bodies"][0].update(format="float16")
    yield "a size with a point", lambda m: _with_a_point(file(m))
    yield "ties that are none", lambda m: m.update(ties=["a"])
    yield "a tie that is none", lambda m: m.update(ties={"a": 1})
    yield "a training that is none", lambda m: m.update(training=7)
    yield "a layout's size that is none", lambda m: m.update(layout_bytes="many")
    yield "no format", lambda m: file(m).update(bodies=[], bytes=0)
    yield "fewer entries", lambda m: file(m)["bodies"][0].update(entries=1)
    yield "files that are none", lambda m: m.update(files={"a": 1})
    yield "a size that is none", lambda m: file(m).update(bytes="many")
    yield "a digest that is none", lambda m: m.update(digest=None)
    yield "another digest", lambda m: m.update(digest="0" * 16)
    yield "a SHA-256 that is none", lambda m: file(m).update(sha256=None)
    yield "something else", lambda m: m.update(more=1)


@pytest.mark.parametrize(("what", "forge"), [pytest.param(*one, id=one[0]) for one in forgeries()])
def test_a_forged_manifest_is_refused_by_name(what: str, forge: Callable[[dict[str, Any]], object]) -> None:
    """Whoever can write to the store can write weights, if there is no key. But no other error, and no half
    version."""
    store, were = chain(0, None)
    _forge(store, VERSIONS, forge)
    if what == "an anchor below 0" or "another digest" in what:
        assert update_until_told_all(store, VERSIONS - 1, None, were) <= 2
        return
    update_until_told_all(store, VERSIONS - 1, None, were)
    update_until_told_all(store, 0, None, were)


def _forge(store: MemoryStore, version: int, forge: Callable[[dict[str, Any]], object]) -> None:
    path = f"versions/{version:012d}.0-of-1.json"
    fields = json.loads(store.files[path].partition(b"\n")[0])
    forge(fields)
    said = json.dumps(fields).encode()
    store.files[path] = said + b"\n" + _seal(said, None).encode() + b"\n"


@pytest.mark.parametrize("text", [b"[" * 100_000, b"7", b"{}", b"[]", b"\xff", b"null", b'{"format":1}'])
def test_a_manifest_of_any_text_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(DamagedError, match="versions/x"):
        Manifest.load(text + b"\n" + _seal(text, None).encode() + b"\n", "versions/x", None)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b"7", b'[["a",[1],"a_dtype_to_come"]]', b'[["a",[1],"Tensor"]]', b'[["a",[-1],"int8"]]'],
)
def test_a_layout_of_any_text_is_refused_by_name(text: bytes) -> None:
    """As a publisher with a newer torch may write it."""
    store, _ = chain(0, None)
    digest = hashlib.sha256(text).hexdigest()
    store.files[f"layouts/{digest}.json"] = text
    _forge(store, VERSIONS, lambda m: m.update(layout=digest, layout_bytes=len(text)))
    with pytest.raises(DamagedError, match=f"layouts/{digest}.json can't be read"):
        subscriber_at(store, zeros(small_weights())).update()


def test_the_next_anchor_mends_a_layout() -> None:
    """Until the next publisher came, every newcomer was refused."""
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher = publisher_at(store, trained, anchor_every=2)
    publisher.publish()
    (layout,) = [path for path in store.files if path.startswith("layouts/")]
    store.files[layout] = b"?" * len(store.files[layout])
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    for _ in range(2):
        with pytest.raises(DamagedError, match=f"{layout} is damaged: its SHA-256 is not its name"):
            subscriber.update()
    for _ in range(2):
        step(trained, generator)
        publisher.publish()
    subscriber.update()
    same_bits(engine, held_of(trained))


# ---- shards ----


def part(offset: tuple[int, int], size: tuple[int, int], start: int, stop: int) -> Region:
    whole = Region.whole("a", (4, 6), torch.bfloat16)
    return replace(whole, offset=offset, size=size, start=start, stop=stop)


@pytest.mark.parametrize(
    ("regions", "told"),
    [
        ([part((0, 0), (2, 6), 0, 12), part((2, 0), (2, 6), 0, 12)], ""),
        ([part((0, 0), (4, 3), 0, 12), part((0, 3), (4, 3), 0, 5), part((0, 3), (4, 3), 5, 12)], ""),
        ([part((0, 0), (2, 6), 0, 12), part((0, 0), (2, 6), 0, 12)], "some are published twice"),
        ([part((0, 0), (4, 6), 0, 12), part((0, 0), (4, 6), 6, 18)], "some are published twice"),
        ([part((0, 0), (2, 6), 0, 12), part((1, 0), (2, 6), 0, 12)], "some are published twice"),
        ([part((0, 0), (2, 6), 0, 12)], "some are missing"),
        ([part((0, 0), (2, 6), 0, 12)] * 3, "some are published twice"),
    ],
)
def test_shards_of_which_one_is_published_twice_and_one_never_are_refused(
    regions: list[Region], told: str
) -> None:
    """As the first ranks of two sites that are sharded publish, told to be two ranks of one: all the numbers
    add up, and half of the weights never arrives."""
    tensors = {"a": torch.zeros(4, 6, dtype=torch.bfloat16)}
    assert Layout.load(Layout(tuple(regions)).text).regions == tuple(regions)
    if not told:
        check_coverage(regions, tensors)
    else:
        with pytest.raises(LayoutError, match=told):
            check_coverage(regions, tensors)
