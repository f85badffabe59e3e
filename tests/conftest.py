"""Fixtures that more than one file uses."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import poison
import pytest
import selection
import torch
import torch.distributed as dist
from hypothesis import settings
from torch._C._distributed_c10d import HashStore

# No test is about time: the first one to need the C kernels compiles them.
EXAMPLES = 6  # of each property in `make test`
settings.register_profile("test", deadline=None, max_examples=EXAMPLES)
settings.register_profile("check", deadline=None)

_LEFT_OUT = pytest.StashKey[list[str]]()
_NEEDS = {
    "integrations": "needs what requirements-integrations.txt lists: `make integrations` runs these tests",
    # Not named vllm: `import vllm` would find such a folder where there is no vLLM.
    "vllm_engine": "needs what requirements-vllm.txt lists: `make vllm` runs these tests",
}
_HAS = {
    "integrations": all(find_spec(name) for name in ("trl", "lightning", "torchtitan")),
    "vllm_engine": find_spec("vllm") is not None,
}
_MISSING = {folder: reason for folder, reason in _NEEDS.items() if not _HAS[folder]}


def look_no_names_up() -> None:
    """A connection of torch's store asks a name server for the name of 127.0.0.1, and waits 5 s for an answer
    that is lost. Here everybody is called by an address, so nobody asks, if this machine knows itself."""
    if "RES_OPTIONS" in os.environ:  # as in a worker
        return
    asks = [sys.executable, "-c", "import socket; socket.getaddrinfo(socket.gethostname(), 0)"]
    os.environ["RES_OPTIONS"] = "attempts:0"
    if subprocess.run(asks, stderr=subprocess.DEVNULL).returncode:
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the files in random order, and the tests in each")
    parser.addoption("--check", action="store_true", help="run everything, not only a sample of each claim")


def pytest_configure(config: pytest.Config) -> None:
    look_no_names_up()
    settings.load_profile("check" if config.getoption("check") else "test")
    # What a shell starts in its background ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests that only `make check` has mostly wait for other processes, for a limit to pass or a rank to be
    noticed. Those of `make test` mostly work. Each worker collects all tests, which takes it ten seconds."""
    return (3 if config.getoption("check") else 2) * (os.cpu_count() or 1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs frameworks that are not installed; None lets other hooks decide."""
    return True if collection_path.name in _MISSING else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip what the command line names all the same."""
    if module_path.parent.name not in _MISSING:
        return None
    return _NotImported.from_parent(parent, path=module_path)


class _NotImported(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(_MISSING[self.path.parent.name], allow_module_level=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)
    # Also before --check: a wrong sample is an error. Of what failed last, only its cases are collected.
    reasons = {} if named else _left_out(items, whole=not config.getoption("lf"))
    if config.getoption("check"):
        _deselect(config, items, [] if named else selection.too_slow(items))
    else:
        config.stash[_LEFT_OUT] = list(reasons.values())
        _deselect(config, items, reasons)
    seed = config.getoption("shuffle")
    if seed is not None:
        items.sort(key=lambda item: [_chance(seed, name) for name in (str(item.path), item.nodeid)])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # its keywords have the names of its folders, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))


def _deselect(config: pytest.Config, items: list[pytest.Item], some: Iterable[pytest.Item]) -> None:
    left_out = set(some)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item], *, whole: bool) -> dict[pytest.Item, str]:
    try:
        return selection.left_out(items, whole=whole)
    except pytest.UsageError as error:
        print(f"ERROR: {error}", file=sys.__stderr__)  # pytest-xdist only says that it has no workers left
        raise


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In one of pytest-xdist's processes: tell the one that prints the summary."""
    told: dict[str, Any] = getattr(session.config, "workeroutput", {})
    told["left out"] = session.config.stash.get(_LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers collect all tests, and leave out the same ones."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for folder, reason in _MISSING.items():
        terminalreporter.write_line(f"tests/{folder}: {reason}")
    reasons = config.stash.get(_LEFT_OUT, [])
    if reasons:
        terminalreporter.section(f"`make check` runs these {len(reasons):,} tests, too")
        for line in selection.summary(reasons):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"and draws 100 examples of each property, not {EXAMPLES}.")


@pytest.fixture
def single_site() -> Iterator[None]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=poison.is_wanted())
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    poison.fill_tensors(_chance(request.config.getoption("shuffle"), f"NaN {request.node.nodeid}") < 0.5)
    yield
    poison.fill_tensors(False)


def _chance(seed: str | None, name: str) -> float:
    return random.Random(f"{seed} {name}").random()
