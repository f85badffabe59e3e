"""A pipeline over slow links: every site and worker a machine of its own, as far as the network knows.

    python -m experiments.pipeline links mbit=100 steps=96 eval_every=96

Each part runs in a network namespace, as a node of a Ray cluster, behind a link that carries so much in
either direction. Four runs, one after the other: PULSELoCo with patches to the workers, one round behind and
not; and DiLoCo in FP32 and DDP over all sites with all weights to the workers. The first site's machine also
has the controller and the store. Bytes are what the kernel counted on the links, Ray's own messages and all
headers included.

Needs root, for the namespaces, and ip and tc. Results go to runs/<name>/, by default runs/pipeline-links/.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.figures import share_of_sites
from experiments.processes.namespaces import MBIT, Network, counters, why_not
from experiments.processes.orphans import through
from experiments.reporting.charts import LOOK, plt, saved, stacked
from experiments.reporting.markdown import markdown
from experiments.settings.checks import require
from experiments.settings.merging import to_yaml

_RAY, _STORE = 6379, 8765  # ports, which are free in namespaces of their own
_START = 120.0  # seconds in which a node has started
_JOINED = b"Ray runtime started"  # what `ray start` says then
_DENSE: dict[str, Any] = {"patches": False, "saving": None, "overlap": None}
WAYS: dict[str, dict[str, Any]] = {
    "PULSELoCo a round behind, patches": {"overlap": 1.0},
    "PULSELoCo, patches": {"overlap": None},
    "DiLoCo in FP32, all weights": _DENSE | {"method": "diloco"},
    "DDP, all weights": _DENSE | {"method": "ddp", "elastic": False},
}
COLUMNS = ("way", "s per step", "sites train", "rounds, MB", "to the store", "to the workers", "samples")
COLUMNS += ("all that was sent, by the kernel", "score")


@dataclass(frozen=True, kw_only=True)
class LinksConfig(PipelineConfig):
    save_every: int = 0  # time is compared
    mbit: float = 100.0  # of every link, in either direction

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mbit > 0, f"mbit must be > 0, got {self.mbit}")
        require(self.address is None, "links are of this machine's own: leave address out")
        require(self.ranks_per_site == 1, "a site is one machine here: leave ranks_per_site at 1")


def links(config: LinksConfig, folder: Path) -> str:
    """-> the table, which is kept in the folder with a plot and the figures of each run."""
    if (reason := why_not()) is not None:
        raise ExperimentError(f"no links can be made: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for number, (name, changes) in enumerate(WAYS.items(), 1):
        print(f"[{number}/{len(WAYS)}] {name}", file=sys.stderr, flush=True)
        found[name] = _run(dataclasses.replace(config, **changes), folder / f"way-{number}")
    (folder / "links.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table(found)
    (folder / "table.md").write_text(text, encoding="utf-8")
    draw(found, folder / "links.png")
    return text


def _run(config: LinksConfig, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"site{k}" for k in range(config.sites)] + [f"worker{k}" for k in range(config.workers)]
    shared = {item.name: getattr(config, item.name) for item in dataclasses.fields(PipelineConfig)}
    shared |= {
        "name": str(folder.relative_to("runs")),
        "weights": f"http://10.0.0.1:{_STORE}",
        "address": f"10.0.0.1:{_RAY}",
        "sites_on": tuple(names[: config.sites]),
        "workers_on": tuple(names[config.sites :]),
    }
    settings = folder / "settings.yaml"
    settings.write_text(to_yaml(PipelineConfig(**shared)), encoding="utf-8")
    with ExitStack() as closing:
        network = closing.enter_context(Network())
        temporary = closing.enter_context(tempfile.TemporaryDirectory())
        environment = _environment()
        machines = [
            closing.enter_context(
                _machine(network, _node(name, k, temporary), folder / f"{name}.log", environment)
            )
            for k, name in enumerate(names)
        ]
        first, weights = machines[0].pid, Path(temporary) / "weights"
        weights.mkdir()
        store = [sys.executable, "-m", "loco", "sync", "serve", str(weights), "--writable"]
        store += ["--host", "10.0.0.1", "--port", str(_STORE)]
        closing.enter_context(_inside(first, store, folder / "store.log", environment))
        network.shape(config.mbit * MBIT)
        before = [counters(process=one.pid) for one in machines]
        command = [sys.executable, "-m", "experiments.pipeline", f"preset={settings}"]
        done = subprocess.run(_entering(first, command), stdout=subprocess.PIPE, text=True, env=environment)
        after = [counters(process=one.pid) for one in machines]
    if done.returncode:
        raise ExperimentError(f"this run ended with {done.returncode}; logs: {folder}")
    figures = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))
    del figures["events"]
    figures["links"] = {name: vars(b - a) for name, a, b in zip(names, before, after, strict=True)}
    return figures


def _node(name: str, number: int, temporary: str) -> list[str]:
    """The command that makes a machine a node of the cluster."""
    ray = str(Path(sys.executable).with_name("ray"))
    own = f"10.0.0.{number + 1}"
    command = [ray, "start", "--block", "--num-cpus=2", f"--node-ip-address={own}", "--disable-usage-stats"]
    command += [f"--resources={json.dumps({name: 1})}", "--object-store-memory=100000000"]
    if number == 0:
        command += ["--head", f"--port={_RAY}", "--include-dashboard=false"]
        return [*command, f"--temp-dir={temporary}/ray"]
    return [*command, f"--address=10.0.0.1:{_RAY}"]


def _environment() -> dict[str, str]:
    """With the tokens that Ray and the store ask for. There is no proxy in these networks, and torch would
    look for its address by the machine's name."""
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return own | {
        "LOCO_SYNC_TOKEN": secrets.token_hex(16),
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash says where
    }


@contextmanager
def _machine(
    network: Network, command: list[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A node of Ray's, in a namespace of its own, that has joined the others."""
    script = 'echo; read go; ip route add default dev eth0; exec "$@"'
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["unshare", "--net", *through(["sh", "-c", script, "sh", *command])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it is in its namespace
        network.attach(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        until = time.monotonic() + _START
        while _JOINED not in (line := process.stdout.readline()):
            if not line or time.monotonic() > until:
                raise ExperimentError(f"a node of Ray's did not start; what it said: {log}")
        yield process
    finally:
        _end_all_of(process.pid)
        process.wait()


def _end_all_of(pid: int) -> None:
    """Of the processes in the namespace of this one: Ray's take half a minute to say goodbye."""
    with suppress(OSError):
        namespace = os.readlink(f"/proc/{pid}/ns/net")
        for other in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(other / "ns/net") == namespace:
                    os.kill(int(other.name), signal.SIGKILL)


@contextmanager
def _inside(pid: int, command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """A program on the machine of this process."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            through(_entering(pid, command)), stdout=said, stderr=said, env=environment
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _entering(pid: int, command: list[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", *command]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown. Megabytes, of what all machines sent."""
    rows = []
    for name, one in found.items():
        flows = ("round bytes", "published bytes", "patch bytes", "sample bytes")
        megabytes = [f"{one['counts'].get(flow, 0) / 1e6:.2f}" for flow in flows]
        sent = sum(link["sent_bytes"] for link in one["links"].values())
        score = one["evaluations"][-1]["score"]
        row = [name, f"{one['seconds_per_step']:.3f}", f"{share_of_sites(one, 'training'):.0%}", *megabytes]
        rows.append([*row, f"{sent / 1e6:.1f}", f"{score:.3f}"])
    return markdown(COLUMNS, rows)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Where the sites' time goes, and what every machine sent."""
    with plt.rc_context(LOOK):
        figure, (time_of, sent_by) = plt.subplots(2, 1, figsize=(9, 6.5))
        doings = ("training", "all-reduce", "exchanging", "publishing", "waiting")
        seconds = {doing: [_mean_of_sites(one, doing) for one in found.values()] for doing in doings}
        stacked(time_of, list(found), seconds)
        time_of.set(title="Seconds of a step, where sites spend them", xlabel="seconds")
        machines = next(iter(found.values()))["links"]
        sent = {name: [one["links"][name]["sent_bytes"] / 1e6 for one in found.values()] for name in machines}
        stacked(sent_by, list(found), sent)
        sent_by.set(title="Sent by each machine, headers and Ray's messages included", xlabel="megabytes")
        saved(figure, path)


def _mean_of_sites(one: dict[str, Any], doing: str) -> float:
    return share_of_sites(one, doing) * (one["ended"] - one["begun"]) / one["config"]["steps"]
