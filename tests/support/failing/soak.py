"""Thousands of rounds of a small model under random faults, and then: is every bit where it belongs, and did
nothing grow?

    export PYTHONPATH=.:tests/support/running
    python tests/support/failing/soak.py rounds=5000 sites=3 seed=1 faults=0.2

    python tests/support/failing/soak.py rounds=600 faults=0 kills=0 stops=242
    python tests/support/failing/soak.py rounds=400 faults=0 kills=0 stops=0 saving_kills=90
    python tests/support/failing/soak.py rounds=400 faults=0 kills=0 stops=0 interrupts=200
    python tests/support/failing/soak.py rounds=500 faults=0 kills=0 stops=0 lies=1

Sites are real processes. In a share `faults` of the rounds something happens to one of them; a kill restarts
all from their checkpoints. Every round is checked for conservation, and the end is compared, bit for bit,
with the same training without any fault.
"""

import gc
import hashlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from disks import DeadlyCall
from lies import LIES
from scripted import Scripted, bits, parameters
from sites import context
from states import assert_same, snapshot
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import loco
from loco.exchange.transfer import Transfer
from loco.round.round import Round
from loco.wire.framing import Framing
from loco.wire.records import FrameHeader

NUMEL, STEPS = 2003, 2
DEAD_AFTER = 1.0  # seconds, where processes are stopped
CALM = 10.0  # where none is: on a busy machine one may not run for a second
SAVED_EVERY = 20  # rounds
KINDS = (
    *("memory", "unread", "hang up", "last vote sent", "last vote not sent", "interrupt"),
    *("not a number", "flipped bit", "late"),
)
RAISED = ("memory", "unread", "not a number", "flipped bit", "interrupt")  # a lost link may be mended unseen
MOST_CALLS = 30  # to the disk in a save


@dataclass(frozen=True)
class Plan:
    rounds: int = 5000
    sites: int = 3
    seed: int = 1
    faults: float = 0.2  # share of rounds
    stops: int = 10  # SIGSTOP at any moment, until the others have noticed; spread over the run
    kills: int = 5  # SIGKILL; in the first third, so that the rest tells what one process grows by
    saving_kills: int = 0  # SIGKILL while all save; spread over the run
    interrupts: int = 0  # Ctrl-C at any moment of a round; spread over the run
    lies: float = 0.0  # share of rounds in which a site lies, in each way of `lies` in turn

    def fault(self, number: int) -> tuple[str, int] | None:
        """What happens to whom in a round."""
        chance = np.random.default_rng((self.seed, number))
        victim = int(chance.integers(self.sites))
        if number in self._spread(self.kills, self.rounds // 3):
            return "kill", victim
        if number in self._spread(self.stops, self.rounds):
            return "stop", victim
        if number in self._spread(self.saving_kills, self.rounds):
            return "kill while saving", victim
        if number in self._spread(self.interrupts, self.rounds):
            return "Ctrl-C", victim
        if chance.random() < self.lies:
            return list(LIES)[number % len(LIES)], victim
        if chance.random() < self.faults:
            return KINDS[int(chance.integers(len(KINDS)))], victim
        return None

    def least_errors(self) -> int:
        """How many sites' errors there are at least since the last kill."""
        last_kill = max(self._spread(self.kills, self.rounds // 3), default=0)
        faults = (self.fault(number) for number in range(last_kill + 1, self.rounds + 1))
        return sum(fault is not None and fault[0] in RAISED for fault in faults)

    def without_faults(self) -> "Plan":
        return Plan(rounds=self.rounds, sites=self.sites, seed=self.seed, faults=0.0, stops=0, kills=0)

    def not_named(self, told: Mapping[int, "Told"]) -> list[int]:
        """The rounds in which a site lied and no other one named it."""
        found = []
        for number in set().union(*(one.lies for one in told.values())):
            fault = self.fault(number)
            assert fault is not None
            others = [one.lies.get(number, "") for site, one in told.items() if site != fault[1]]
            # Who exchanges otherwise than the others may be the first to find that, and leave.
            kinds = "WireError|TransportError" if fault[0] == "exchanges otherwise" else "WireError"
            named = re.compile(rf"({kinds}).*site {fault[1]}\b", re.DOTALL)
            if not any(named.match(text) for text in others):
                found.append(number)
        return found

    def _spread(self, count: int, over: int) -> set[int]:
        return {5 + k * (over - 5) // count for k in range(count)} if count else set()


@dataclass
class Told:
    """What a site came to."""

    state: str  # a hash of θ, m, e and w
    errors: Counter[str]
    checked: int  # rounds whose conservation was checked
    lies: dict[int, str]  # by round, of those in which a site lied: what this one said of it
    grown: list[tuple[int, int, int, int]]  # now and then: round, resident bytes, open files, threads


def soak(plan: Plan, tell: Callable[[str], None] = lambda _: None) -> dict[int, Told]:
    """Run it -> what each site came to."""
    with tempfile.TemporaryDirectory() as folder:
        while True:
            told = _generation(plan, folder, tell)
            if told is not None:
                return told
            tell("a site was killed: all restart from their checkpoints")


def _generation(plan: Plan, folder: str, tell: Callable[[str], None]) -> dict[int, Told] | None:
    """All sites' processes, until they have ended or one was killed. -> None if one was"""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links: dict[Connection, int] = {}
    processes = []
    for rank in range(plan.sites):
        ours, theirs = context.Pipe()
        process = context.Process(target=_site, args=(rank, store.port, plan, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        links[ours] = rank
        processes.append(process)
    told: dict[int, Told] = {}
    wake: list[tuple[float, int]] = []
    try:
        while len(told) < plan.sites:
            for link in wait(list(links), 0.05):
                assert isinstance(link, Connection)
                try:
                    word = link.recv()
                except EOFError:
                    return None
                if isinstance(word, Told):
                    told[links.pop(link)] = word
                elif isinstance(word, Exception):
                    raise word
                elif word[0] == "stop":
                    time.sleep(word[2])
                    os.kill(word[1], signal.SIGSTOP)
                    wake.append((time.monotonic() + 1.5 * DEAD_AFTER, word[1]))
                else:
                    tell(word[1])
            for at, pid in [w for w in wake if w[0] < time.monotonic()]:
                os.kill(pid, signal.SIGCONT)
                wake.remove((at, pid))
        return told
    finally:
        for process in processes:
            process.kill()
            process.join()


def _site(rank: int, port: int, plan: Plan, folder: str, link: Connection) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.sites)
        link.send(_train(rank, plan, folder, link))
    except BaseException as error:
        link.send(RuntimeError(f"site {rank}: {type(error).__name__}: {error}"))
    threading.Event().wait()  # the parent ends all at once: who left early would be missed by the others


def _train(rank: int, plan: Plan, folder: str, link: Connection) -> Told:
    inner = Scripted(parameters(plan.seed, NUMEL), plan.seed, rank)
    repeats = 0 if plan.lies else 2  # who lies does so in every repeat
    dead_after = DEAD_AFTER if plan.stops else CALM
    topology = loco.Topology(timeout=30.0, patience=30.0, dead_after=dead_after, repeats=repeats)
    exchange = "gather" if plan.lies else "auto"  # a site can't lie about an exchange of which there is none
    optimizer = loco.PulseLoCo(inner, sync_every=STEPS, exchange=exchange, topology=topology)
    checkpoints = loco.Checkpoints(folder)
    resumed = checkpoints.load(optimizer)
    inner.count = resumed.extra["count"] if resumed else 0
    told = Told("", Counter(), 0, {}, [])
    struck = Path(folder) / f"struck-{rank}"  # what has happened does not happen again after a restart
    began, took = time.monotonic(), 0.05  # seconds of the shortest round: a moment of it is one of any round
    with _conservation_checked(told, optimizer):
        while optimizer.round < plan.rounds:
            number = optimizer.round + 1
            fault, chance = plan.fault(number), np.random.default_rng(number)
            befalls = fault is not None and fault[1] == rank and not Path(f"{struck}-{number}").exists()
            if fault is not None and befalls:
                Path(f"{struck}-{number}").touch()
            for _ in range(STEPS - 1):
                optimizer.step()
            inner.step()  # the last step, without its round
            before = snapshot(optimizer)
            started = time.monotonic()
            with _befallen(fault[0] if fault and befalls else "", optimizer, link, chance.random() * took):
                said = _attempt(optimizer.sync, told)
            took = took if said else min(took, time.monotonic() - started)
            if said and fault is not None and fault[0] in LIES:
                told.lies[number] = said
                assert optimizer.round == number - 1
                assert_same(before, snapshot(optimizer))
            while optimizer.round < number:
                if "Load the last checkpoint" in _attempt(optimizer.sync, told):
                    link.send(("say", f"Ctrl-C came while site {rank} applied round {number}"))
                    os.kill(os.getpid(), signal.SIGKILL)
            dies = fault is not None and fault[0] == "kill while saving"
            if number % SAVED_EVERY == 0 or dies:
                call = DeadlyCall(folder, int(chance.integers(1, MOST_CALLS))) if dies and befalls else None
                while _attempt(lambda: checkpoints.save(optimizer, {"count": inner.count}), told):
                    pass
                if call is not None:
                    checkpoints.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            if number % max(plan.rounds // 50, 1) == 0:
                gc.collect()
                told.grown.append((number, *_resources()))
                if rank == 0:
                    pace = (time.monotonic() - began) / 60
                    link.send(
                        ("say", f"round {number} of {plan.rounds}, {pace:.1f} min, {dict(told.errors)}")
                    )
    checkpoints.wait()
    state = snapshot(optimizer)
    told.state = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
    return told


def _attempt(do: Callable[[], object], told: Told) -> str:
    """-> what was raised"""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            do()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (loco.LocoError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        told.errors[type(error).__name__] += 1
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _befallen(kind: str, optimizer: loco.PulseLoCo, link: Connection, moment: float) -> Iterator[None]:
    """One attempt of a round, in which `kind` happens to this site; what comes at any moment, after `moment`
    seconds."""
    anchor, weight = optimizer.outer_state.anchor, optimizer.outer_state.parameters.params[-1].data
    opened, verdict, vote = Transfer.open, Transfer.verdict, Round.vote
    confirmed = False

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left (injected)")

    def damaged(self: Transfer, site: int, header: FrameHeader, body: Tensor, at: slice) -> Any:
        body[-1] ^= 0x40
        return opened(self, site, header, body, at)

    def lose(self: Transfer) -> Any:
        verdict(self)
        raise loco.TransportError("lost a link (injected)")

    def last_vote(sent: bool, error: BaseException) -> Callable[..., None]:
        def cut(self: Round) -> None:
            nonlocal confirmed
            if confirmed:
                return vote(self)
            confirmed = True
            self.is_promised = True
            if sent:
                vote(self)
            raise error

        return cut

    with pytest.MonkeyPatch.context() as patch:
        if kind == "memory":
            place = np.random.default_rng(optimizer.round).choice(["seal", "open"])
            patch.setattr(Framing, str(place), fail)
        elif kind == "unread":
            patch.setattr(Transfer, "open", damaged)
        elif kind == "hang up":
            patch.setattr(Transfer, "verdict", lose)
        elif kind == "last vote sent":
            patch.setattr(Round, "vote", last_vote(True, loco.TransportError("lost a link (injected)")))
        elif kind == "last vote not sent":
            patch.setattr(Round, "vote", last_vote(False, loco.TransportError("lost a link (injected)")))
        elif kind == "interrupt":
            patch.setattr(Round, "vote", last_vote(True, KeyboardInterrupt()))
        elif kind == "late":
            time.sleep(0.1)
        elif kind == "stop":
            link.send(("stop", os.getpid(), moment))
        elif kind == "Ctrl-C":
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif kind in LIES:
            LIES[kind](patch)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        kept = weight[7].clone()
        if kind == "not a number":
            weight[7] = float("nan")
        elif kind == "flipped bit":
            anchor.view(torch.int32)[11] ^= 1
        yield
        if kind == "not a number":
            weight[7] = kept
        elif kind == "flipped bit":
            anchor.view(torch.int32)[11] ^= 1


@contextmanager
def _conservation_checked(told: Told, optimizer: loco.PulseLoCo) -> Iterator[None]:
    """Around every round that is applied: what was sent and what is withheld are s, bit for bit."""
    update, seen = (
        torch.zeros(0),
        0,
    )  # of the round with this number; Ctrl-C may come while this hook looks at it

    def check(progress: loco.RoundProgress) -> None:
        nonlocal update, seen
        state = progress.state
        assert state.residual is not None
        if progress.phase == "committed":
            w = torch.cat([p.detach().reshape(-1).float() for p in state.parameters.params])
            update = (state.anchor - w) + state.residual
            seen = progress.number
        elif progress.phase == "applied" and seen == progress.number:
            assert progress.entries is not None
            sent = torch.zeros_like(update)
            sent[progress.entries.indices()] = progress.entries.values
            assert not ((sent != 0) & (state.residual != 0)).any()
            np.testing.assert_array_equal(bits(sent + state.residual), bits(update + 0.0))
            told.checked += 1

    handle = optimizer.register_round_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _resources() -> tuple[int, int, int]:
    """Resident bytes, open files, threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def main() -> int:
    values = dict(argument.split("=") for argument in sys.argv[1:])
    kinds = {name: type(value) for name, value in vars(Plan()).items()}
    plan = Plan(**{name: kinds[name](value) for name, value in values.items()})

    def tell(word: str) -> None:
        print(word, flush=True)

    began = time.monotonic()
    told = soak(plan, tell)
    took = time.monotonic() - began
    clean = soak(plan.without_faults())
    happened = Counter(fault[0] for n in range(1, plan.rounds + 1) if (fault := plan.fault(n)))
    errors: Counter[str] = sum((one.errors for one in told.values()), Counter())
    print(f"{plan.rounds} rounds of {plan.sites} sites in {took / 60:.1f} min; injected {dict(happened)}")
    print(f"errors raised since the last restart: {dict(errors)}")
    for rank, one in told.items():
        same = one.state == clean[rank].state
        seen = one.grown[len(one.grown) // 10 :: max(len(one.grown) // 6, 1)] + one.grown[-1:]
        memory = ", ".join(f"{size / 2**20:.1f}" for _, size, *_ in seen)
        print(
            f"site {rank}: {'the same bits as' if same else 'NOT the bits of'} a run without faults; "
            f"conserved in {one.checked} rounds; from round {seen[0][0]} to {seen[-1][0]} MiB {memory}; "
            f"files {seen[0][2]} to {seen[-1][2]}, threads {seen[0][3]} to {seen[-1][3]}"
        )
    lies = set().union(*(one.lies for one in told.values()))
    not_named = plan.not_named(told)
    print(f"{len(lies)} lies, of which the liar was not named in rounds {not_named}")
    return 0 if not not_named and all(one.state == clean[rank].state for rank, one in told.items()) else 1


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
