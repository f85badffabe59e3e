"""A store in memory whose calls fail or wait for their turn, and weights small enough for many versions."""

import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from published import cast, same_bits
from torch import Tensor

from loco.sync import Publisher, Subscriber
from loco.sync.storage.names import Buffer
from loco.sync.versions.manifest import Manifest

Weights = dict[str, Tensor]
WHOLE = 1 << 26  # bytes; no test's file has more


def small_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(63, 21, generator=generator) * 0.02, "b": torch.randn(7, generator=generator)}


def step(trained: Weights, generator: torch.Generator, share: float = 0.1) -> Weights:
    """Something like a step: a share of the weights moves. -> what a subscriber then should hold"""
    for tensor in trained.values():
        moves = torch.rand(tensor.shape, generator=generator) < share
        tensor.add_(1e-3 * moves * torch.randn(tensor.shape, generator=generator))
    return held_of(trained)


def held_of(trained: Weights) -> Weights:
    return {name: cast(tensor).clone() for name, tensor in trained.items()}


def zeros(trained: Weights) -> Weights:
    return {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in trained.items()}


def copied(engine: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in engine.items()}


def is_same(a: Weights, b: Weights) -> bool:
    try:
        same_bits(a, b)
    except AssertionError:
        return False
    return True


class MemoryStore:
    """What a `Store` must do, and no more. Copies of it share the files."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {} if files is None else files
        self.url = "memory"
        self.at_once = 1

    def before(self, call: str, path: str) -> None:
        """Called before each call."""

    def after(self, call: str, path: str) -> None:
        """Called after each call, before its answer arrives."""

    def read(self, path: str, most: int) -> bytes:
        return self._read(path)[:most]

    def read_chunks(self, path: str) -> Iterator[bytes]:
        yield self._read(path)

    def _read(self, path: str) -> bytes:
        self.before("read", path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there", path)
        found = self.files[path]
        self.after("read", path)
        return found

    def write(self, path: str, data: bytes) -> None:
        self.before("write", path)
        self.files[path] = bytes(data)
        self.after("write", path)

    def write_chunks(self, path: str, chunks: Iterable[Buffer]) -> None:
        self.write(path, b"".join(chunks))

    def create(self, path: str, data: bytes) -> None:
        self.before("create", path)
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "there already", path)
        self.files[path] = bytes(data)
        self.after("create", path)

    def names(self, folder: str) -> list[str]:
        self.before("names", folder)
        paths = [path.partition("/") for path in list(self.files)]
        self.after("names", folder)
        return sorted(name for parent, _, name in paths if parent == folder)

    def delete(self, path: str) -> None:
        self.before("delete", path)
        self.files.pop(path, None)
        self.after("delete", path)

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        return self.names(folder)


class FailingStore(MemoryStore):
    """One call fails.

    Attributes:
        at: the number of this call, from 1; 0: none.
        lost: what fails is the answer: the call has been done.
        hook: is called before each call, with its number.
    """

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        super().__init__(files)
        self.at, self.calls, self.lost = 0, 0, False
        self.hook: Callable[[int], object] = lambda number: None
        self.failed = ""

    def fail(self, at: int, lost: bool = False) -> None:
        self.at, self.calls, self.lost, self.failed = at, 0, lost, ""

    def before(self, call: str, path: str) -> None:
        self.calls += 1
        self.hook(self.calls)
        if not self.lost:
            self._fail(call, path)

    def after(self, call: str, path: str) -> None:
        if self.lost:
            self._fail(call, path)

    def _fail(self, call: str, path: str) -> None:
        if self.calls == self.at:
            self.failed = f"{call} {path}"
            raise ConnectionResetError(errno.ECONNRESET, "the link is down", path)


def publisher_at(store: MemoryStore, source: Weights, **settings: object) -> Publisher:
    publisher = Publisher(source, "memory://", **settings)  # pyright: ignore[reportArgumentType]
    publisher._writer._store = store
    return publisher


def subscriber_at(store: MemoryStore, engine: Weights, **settings: object) -> Subscriber:
    subscriber = Subscriber(engine, "memory://", **settings)  # pyright: ignore[reportArgumentType]
    subscriber._reader._store = store
    return subscriber


def orphans(files: dict[str, bytes], key: bytes | None = None) -> set[str]:
    """Anchors and patches that no manifest names."""
    named: set[str] = set()
    for path, text in files.items():
        if path.startswith("versions/0"):
            named |= {file.path for file in Manifest.load(text, path, key).files}
    return {path for path in files if path.startswith("weights/0")} - named


def files_in(folder: Path) -> dict[str, bytes]:
    """As of a `MemoryStore`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
