"""Four sites train, one is killed, the others go on, it comes back and is given what it missed:

    python -m experiments.elastic
    python -m experiments.elastic steps=960 dies=40 returns=60

The sites, and the store at which they meet, are processes on this machine, joined over loopback. The run is
trained twice, once undisturbed. Results go to runs/elastic/: the curves, the figures in results.json, and
what each process said.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from experiments.elastic.site import DEAD_AFTER, VICTIM, ElasticConfig
from experiments.errors import ExperimentError
from experiments.processes.meeting import meeting
from experiments.processes.orphans import through
from experiments.reporting.plots import draw_elastic
from experiments.settings.merging import load

_SILENCE = 120.0  # seconds
_INTERRUPTED = 130

Event = dict[str, Any]


class Processes:
    """Sites and their store. None of them outlives `processes()`, nor this process, however it ends."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder, self._closing = folder, closing
        self._sites: dict[str, subprocess.Popen[Any]] = {}
        self._written = closing.enter_context((folder / "events.jsonl").open("a", encoding="utf-8"))
        self._events = closing.enter_context((folder / "events.jsonl").open(encoding="utf-8"))
        self._at = closing.enter_context(meeting(folder / "store.log"))

    def start(self, number: int) -> None:
        name = f"site-{number}"
        own = [f"site={name}", f"data={number}", f"at={self._at}"]
        command = [sys.executable, "-m", "experiments.elastic.site", *sys.argv[1:], *own]
        self._sites[name] = self._run(command, name, out=self._written)

    def kill(self, number: int) -> None:
        self._sites[f"site-{number}"].kill()

    def next(self) -> Event:
        """What a site says next."""
        deadline = time.monotonic() + _SILENCE
        line = self._events.readline()
        while not line.endswith("\n"):  # nothing yet, or a line of which a site is about to write the rest
            for name, process in self._sites.items():
                if process.poll() not in (None, 0, -signal.SIGKILL):
                    log = self._folder / f"{name}.log"
                    *_, last = log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
                    raise ExperimentError(f"{name} failed: {last.removeprefix('error: ')} (see {log})")
            if time.monotonic() > deadline:
                raise ExperimentError(f"no site has said anything for {_SILENCE:g} s; see {self._folder}")
            time.sleep(0.05)
            line += self._events.readline()
        return json.loads(line)

    def _run(self, command: list[str], name: str, *, out: IO[str] | None = None) -> subprocess.Popen[Any]:
        """`out` takes what it says, and its log the rest."""
        log = self._closing.enter_context((self._folder / f"{name}.log").open("a", encoding="utf-8"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        process = subprocess.Popen(through(command), stdout=out or log, stderr=log, env=environment)
        self._closing.callback(process.wait)
        self._closing.callback(process.kill)
        return process


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    with ExitStack() as closing:
        yield Processes(folder, closing)


def run(config: ElasticConfig, folder: Path, *, disturbed: bool) -> list[Event]:
    """Everything that the sites said, and when one was killed and started again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    title = "with a site that dies and comes back" if disturbed else "undisturbed"
    print(f"{config.sites} sites, {title}", flush=True)
    events: list[Event] = []
    plan = [("killed", config.dies), ("started", config.returns)] if disturbed else []
    with processes(folder) as running:
        for number in range(config.sites):
            running.start(number)
        ended, round = set(), 0
        while len(ended) < config.sites:
            event = running.next()
            events.append(event)
            if event["event"] != "round" or (event["round"] > round and event["round"] % 10 == 0):
                _show(event)
            round = max(round, event["round"])
            if event["event"] == "end":
                ended.add(event["site"])
            while plan and round >= plan[0][1]:
                done, _ = plan.pop(0)
                (running.kill if done == "killed" else running.start)(VICTIM)
                events.append({"site": f"site-{VICTIM}", "event": done, "time": time.time(), "round": round})
                _show(events[-1])
    return events


def results(config: ElasticConfig, disturbed: list[Event], undisturbed: list[Event]) -> dict[str, Any]:
    """The figures of both runs."""

    def only(events: list[Event], what: str) -> list[Event]:
        return [event for event in events if event["event"] == what]

    (killed,), (started,), rounds = (only(disturbed, what) for what in ("killed", "started", "round"))
    back = next(e for e in only(disturbed, "joined") if e["time"] > started["time"])
    without = [e for e in rounds if e["sites"] < config.sites]
    counted = [e for e in rounds if e["site"] == back["site"] and e["round"] > back["round"]]
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
        "held_out_at_the_end": {
            "disturbed": rounds[-1]["held_out"],
            "undisturbed": only(undisturbed, "round")[-1]["held_out"],
        },
        "dead_after": DEAD_AFTER,
    }


def _show(event: Event) -> None:
    more = f": {event['sites']} sites, loss {event['held_out']:.3f}" if event["event"] == "round" else ""
    print(f"  round {event['round']}, {event['site']}: {event['event']}{more}", flush=True)


def main() -> int:
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)  # see experiments/__init__.py
    if set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return 0
    try:
        config = load(ElasticConfig, sys.argv[1:])
        folder = Path("runs") / (config.name or "elastic")
        undisturbed = run(config, folder / "undisturbed", disturbed=False)
        disturbed = run(config, folder / "disturbed", disturbed=True)
        found = results(config, disturbed, undisturbed)
        (folder / "events.json").write_text(json.dumps([disturbed, undisturbed]), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw_elastic(disturbed, undisturbed, folder / "elastic.png")
        print(f"{json.dumps(found, indent=1)}\nresults: {folder}")
        if len(set(found["digests_at_the_end"].values())) != 1:
            raise ExperimentError("the sites do not hold the same bits at the end")
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: all sites were stopped", file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
