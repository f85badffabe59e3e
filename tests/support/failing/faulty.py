"""Faults that a site does to itself, at a given phase of a given round."""

import math
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scripted import Scripted, move

import loco
from loco import kernels
from loco.checkpoints.rank_manifest import RankManifest
from loco.coordination import commit
from loco.coordination.reconnect_barrier import ReconnectBarrier
from loco.errors import TransportError
from loco.exchange.transfer import Transfer
from loco.members import fixed
from loco.net.linking import PatientStore
from loco.net.pending import PendingMessages
from loco.net.transport import Transport
from loco.round.round import Round
from loco.wire.framing import Frame, Framing

# In the order of a round. "voted": a rank's last vote is on its way, and it waits for the others'.
PHASES = (
    *("inner step", "encode", "announcement", "payload", "vote", "voted", "decision", "apply"),
    *("applied", "shared", "half shared", "checkpoint", "reconnecting", "linking", "half linked"),
)


Mend = Callable[[], object]
Deed = Callable[[loco.PulseLoCo], Mend | None]


@dataclass(frozen=True)
class Fault:
    """`what` befalls a rank in the phase `at` of a round, once."""

    what: str
    at: str
    rank: int = 1
    round: int = 2
    seconds: float = 0.0  # of a delay


def arm(fault: Fault, rounds: Callable[[], int], do: Callable[[], None]) -> None:
    """Have this process call `do` when it comes to the fault's phase for the first time."""
    done = False
    ticks = 0

    def strike() -> None:
        nonlocal done
        if not done and rounds() + 1 == fault.round:
            done = True
            do()

    def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
        plain = getattr(owner, name)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                strike()
            return plain(*args, **kwargs)

        setattr(owner, name, hooked)

    def second_tick(*_: Any) -> bool:
        nonlocal ticks
        ticks += rounds() + 1 == fault.round
        return ticks == 2

    if fault.at == "checkpoint":  # in the middle of writing it
        before(RankManifest, "write")
    elif fault.at == "inner step":
        before(Scripted, "step")
    elif fault.at == "encode":
        before(kernels, "encode")
    elif fault.at == "announcement":
        before(Round, "announce")
    elif fault.at == "vote":
        before(Transport, "swap_records", lambda self, _, phase, **__: self.size > 1 and ", vote" in phase)
    elif fault.at == "payload":
        before(Transfer, "wait", second_tick)
    elif fault.at == "voted":
        before(PendingMessages, "wait", lambda self, *_: ", vote" in self._phase and self.sent > 0)
    elif fault.at == "decision":
        before(commit, "decide")
    elif fault.at == "apply":
        before(kernels, "apply")
    elif fault.at == "shared":  # inside a site; the others' parts may still be on their way
        before(PendingMessages, "wait", lambda self, *_: "anchor inside" in self._phase)
    elif fault.at == "half shared":  # the others of the site have all they wait for, and this rank has not
        share = Transport.gather

        def gather(self: Transport, *args: Any, **kwargs: Any) -> Any:
            parts = share(self, *args, **kwargs)
            strike()
            return parts

        setattr(Transport, "gather", gather)  # noqa: B010
    elif fault.at == "applied":
        plain = kernels.apply

        def apply(*args: Any) -> float:
            norm = plain(*args)
            strike()
            return norm

        kernels.apply = apply
    elif fault.at == "reconnecting":  # this rank has come to the meeting, and waits there
        before(ReconnectBarrier, "_pause")
    elif fault.at == "linking":  # all have met, and build their links
        before(fixed.FixedSites, "connect")
    elif fault.at == "half linked":  # its address is known, and others connect to it
        before(PatientStore, "wait")
    else:
        raise ValueError(f"no phase {fault.at!r}")


def close_links(store_port: int) -> None:
    """Break every TCP connection of this process but the store's, as a router that forgets would."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, IndexError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.getpeername()[1] != store_port:
                end.shutdown(socket.SHUT_RDWR)


def fill(folder: str) -> Mend:
    """The disk that holds this folder, and nothing else, has no room left."""
    if not os.path.ismount(folder):
        raise ValueError(f"{folder} is on a disk that others need")
    filler = Path(folder) / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler.unlink


def _signal(number: signal.Signals) -> Deed:
    def send(_: loco.PulseLoCo) -> None:
        os.kill(os.getpid(), number)

    return send


def _damage_frame(_: loco.PulseLoCo) -> None:
    """The next frame that this process seals has a wrong bit."""
    plain = Framing.seal

    def seal(self: Framing, *args: Any) -> Frame:
        header, body, _ = plain(self, *args)
        setattr(Framing, "seal", plain)  # noqa: B010  (a type checker has it that methods are not replaced)
        body = body.clone()
        body[-1] ^= 0x40
        return Frame(header, body)

    setattr(Framing, "seal", seal)  # noqa: B010


def _shift_clock(_: loco.PulseLoCo) -> None:
    """The wall clock is an hour late from now on; nothing in a round may go by it."""
    plain = time.time
    time.time = lambda: plain() - 3600.0


def _spoil(value: float) -> Deed:
    """A weight is not finite, until it is mended: given what the script would have made of it."""

    def do(optimizer: loco.PulseLoCo) -> Mend:
        weight = optimizer.param_groups[0]["params"][3].data
        kept, inner = weight[7].clone(), _scripted(optimizer)
        began = inner.count
        weight[7] = value

        def mend() -> None:
            weight[7] = kept
            for step in range(began, inner.count):
                weight[7] -= float(_moves(optimizer, step)[12 + 1 + 7])

        return mend

    return do


def _flip(optimizer: loco.PulseLoCo) -> Mend:
    """One bit of θ; the same again mends it."""

    def turn() -> None:
        optimizer.outer_state.anchor.view(torch.int32)[0] ^= 1

    turn()
    return turn


@torch.no_grad()
def _scale(optimizer: loco.PulseLoCo) -> None:
    """The inner step that comes next is a million times too large."""
    moves = torch.from_numpy(_moves(optimizer, _scripted(optimizer).count))
    optimizer.param_groups[0]["params"][3].sub_(moves[13:] * 1e6)


def _scripted(optimizer: loco.PulseLoCo) -> Scripted:
    assert isinstance(optimizer.inner, Scripted)
    return optimizer.inner


def _moves(optimizer: loco.PulseLoCo, step: int) -> Any:
    inner = _scripted(optimizer)
    numel = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    return move(inner.seed, inner.site, step, numel, inner.scale)


def _fail(_: loco.PulseLoCo) -> None:
    raise TransportError("anchor inside the site: a link broke")


DEEDS: dict[str, Deed] = {
    "link error": _fail,
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "damaged": _damage_frame,
    "clock": _shift_clock,
    "NaN": _spoil(math.nan),
    "Inf": _spoil(math.inf),
    "flipped": _flip,
    "huge": _scale,
}
