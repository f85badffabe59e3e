"""Four sites train, one is killed, the others go on, it comes back and is given what it missed:

    python -m experiments.elastic
    python -m experiments.elastic steps=960 dies=40 returns=60

A lighthouse and the sites are processes on this machine, joined over loopback. The run is trained twice, once
undisturbed. Results go to runs/elastic/: the curves, the figures in results.json, and what each process said.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from experiments.elastic_site import ElasticConfig
from experiments.errors import ExperimentError
from experiments.merging import load
from experiments.orphans import through
from experiments.plots import draw_elastic

VICTIM = 2
_HEARTBEAT = 2000  # milliseconds without a sign of life after which the lighthouse goes on without a site
_SILENCE = 120.0  # seconds
_INTERRUPTED = 130

Event = dict[str, Any]


class Processes:
    """A lighthouse and sites. None of them outlives the `with`, nor this process, however it ends."""

    def __init__(self, config: ElasticConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._events: queue.Queue[Event] = queue.Queue()
        self._sites: dict[str, subprocess.Popen[str]] = {}
        self._all: list[subprocess.Popen[Any]] = []
        self._logs: list[IO[str]] = []
        self.lighthouse = ""

    def __enter__(self) -> Processes:
        port = _free_port()
        command = [_lighthouse_command(), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
        command += ["--join_timeout_ms", "600000", "--heartbeat_timeout_ms", str(_HEARTBEAT)]
        self._run(command, "lighthouse")
        self.lighthouse = f"http://127.0.0.1:{port}"
        _wait_for(port)
        return self

    def start(self, number: int) -> None:
        name = f"site-{number}"
        own = [f"site={name}", f"data={number}", f"lighthouse={self.lighthouse}", "address=127.0.0.1"]
        command = [sys.executable, "-m", "experiments.elastic_site", *sys.argv[1:], *own]
        process = self._run(command, name, heard=True)
        self._sites[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def kill(self, number: int) -> None:
        self._sites[f"site-{number}"].kill()

    def next(self) -> Event:
        """What a site says next."""
        try:
            event = self._events.get(timeout=_SILENCE)
        except queue.Empty:
            raise ExperimentError(
                f"no site has said anything for {_SILENCE:g} s; see {self._folder}"
            ) from None
        process = self._sites[event["site"]]
        if (
            event["event"] == "gone"
            and process is event["process"]
            and process.wait() not in (0, -signal.SIGKILL)
        ):
            log = self._folder / f"{event['site']}.log"
            raise ExperimentError(f"{event['site']} failed: {_last_line(log)} (see {log})")
        return event

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._all:
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()

    def _run(self, command: list[str], name: str, *, heard: bool = False) -> subprocess.Popen[Any]:
        """heard: what it says is read here; the rest goes to its log."""
        log = open(self._folder / f"{name}.log", "a", encoding="utf-8")  # noqa: SIM115  (closed at the end)
        self._logs.append(log)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        out = subprocess.PIPE if heard else log
        process = subprocess.Popen(through(command), stdout=out, stderr=log, env=environment, text=True)
        self._all.append(process)
        return process

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put({"site": name, **json.loads(line)})
        self._events.put({"site": name, "event": "gone", "process": process, "time": time.time()})


def run(config: ElasticConfig, folder: Path, *, disturbed: bool) -> list[Event]:
    """Everything that the sites said, and when one was killed and started again."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        log.unlink()
    title = "with a site that dies and comes back" if disturbed else "undisturbed"
    print(f"{config.sites} sites, {title}", flush=True)
    events: list[Event] = []

    def note(done: str, round: int) -> None:
        events.append({"site": f"site-{VICTIM}", "event": done, "time": time.time(), "round": round})
        _show(events[-1], config)

    with Processes(config, folder) as processes:
        for number in range(config.sites):
            processes.start(number)
        ended, round, killed, started = set(), 0, not disturbed, not disturbed
        while len(ended) < config.sites:
            event = processes.next()
            if event["event"] == "gone":
                continue
            events.append(event)
            _show(event, config, first=event["round"] > round)
            round = max(round, event["round"])
            if event["event"] == "end":
                ended.add(event["site"])
            if not killed and round >= config.dies:
                processes.kill(VICTIM)
                killed = True
                note("killed", round)
            if not started and round >= config.returns:
                processes.start(VICTIM)
                started = True
                note("started", round)
    return events


def results(config: ElasticConfig, disturbed: list[Event], undisturbed: list[Event]) -> dict[str, Any]:
    """The figures of both runs."""

    def only(events: list[Event], what: str) -> list[Event]:
        return [event for event in events if event["event"] == what]

    def final(events: list[Event]) -> float:
        return only(events, "round")[-1]["held_out"]

    (killed,) = only(disturbed, "killed")
    (started,) = only(disturbed, "started")
    back = next(e for e in only(disturbed, "joined") if e["time"] > started["time"])
    without = [e for e in only(disturbed, "round") if e["sites"] < config.sites]
    counted = [
        e for e in only(disturbed, "round") if e["site"] == back["site"] and e["round"] > back["round"]
    ]
    return {
        "sites": config.sites,
        "rounds": config.steps // config.sync_every,
        "killed_after_round": killed["round"],
        "seconds_from_kill_to_next_round": min(e["time"] for e in without) - killed["time"],
        "first_round_without_it": without[0]["round"],
        "last_round_without_it": max(e["round"] for e in without),
        "given_round": back["round"],
        "seconds_from_start_to_theta": back["time"] - started["time"],
        "first_round_with_it_again": counted[0]["round"],
        "digests_at_the_end": {e["site"]: e["digest"] for e in only(disturbed, "end")},
        "held_out_at_the_end": {"disturbed": final(disturbed), "undisturbed": final(undisturbed)},
        "heartbeat_timeout_ms": _HEARTBEAT,
    }


def _show(event: Event, config: ElasticConfig, *, first: bool = True) -> None:
    what, round = event["event"], event["round"]
    if what == "round":
        if first and round % 10 == 0:
            rounds = config.steps // config.sync_every
            print(
                f"  round {round}/{rounds}: {event['sites']} sites, loss {event['held_out']:.3f}", flush=True
            )
        return
    words = {
        "joined": f"joined at round {round}",
        "given": f"was given round {round}",
        "killed": f"is killed after round {round}",
        "started": f"is started again in round {round}",
        "end": f"ends at round {round} with θ {event.get('digest')}",
    }
    print(f"  {event['site']} {words[what]}", flush=True)


def _lighthouse_command() -> str:
    """torchft's own, installed beside this Python."""
    command = shutil.which("torchft_lighthouse", path=sysconfig.get_path("scripts"))
    if find_spec("torchft") is None or command is None:
        raise ExperimentError("sites that come and go need torchft: pip install torchft")
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ExperimentError(f"the lighthouse does not listen on port {port} ({error})") from error
            time.sleep(0.1)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
    return lines[-1].removeprefix("error: ")


def main() -> int:
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)  # see experiments/__init__.py
    if set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return 0
    try:
        config = load(ElasticConfig, sys.argv[1:])
        rounds = config.steps // config.sync_every
        if not 0 < config.dies < config.returns < rounds - 1 or config.sites <= VICTIM:
            raise ExperimentError(
                f"of {rounds} rounds, dies must be before returns, and that before the end, with at least "
                f"{VICTIM + 1} sites: got dies={config.dies} returns={config.returns} sites={config.sites}"
            )
        folder = Path("runs") / (config.name or "elastic")
        undisturbed = run(config, folder / "undisturbed", disturbed=False)
        disturbed = run(config, folder / "disturbed", disturbed=True)
        found = results(config, disturbed, undisturbed)
        (folder / "events.json").write_text(json.dumps([disturbed, undisturbed]), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw_elastic(disturbed, undisturbed, folder / "elastic.png")
        print(json.dumps(found, indent=1))
        print(f"results: {folder}")
        if len(set(found["digests_at_the_end"].values())) != 1:
            raise ExperimentError("the sites do not hold the same bits at the end")
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the lighthouse and all sites were stopped", file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
