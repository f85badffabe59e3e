"""A site whose program holds Python's interpreter lock is alive, and the others wait for it."""

import ctypes
import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from selection import INTERRUPTIONS
from sites import error_of, launch_worlds
from torch import Tensor, nn

import loco
from loco.coordination.liveness import BEATS
from loco.coordination.pulse.stand_in import PREPARED, STEP

H, ROUNDS, DEAD_AFTER = 2, 4, 1.0
KEY = b"sixteen bytes and a few"


def built(key: bytes | None) -> tuple[loco.PulseLoCo, nn.Parameter]:
    topology = loco.Sites(dead_after=DEAD_AFTER, patience=60.0, repeats=0, key=key)
    parameter = nn.Parameter(torch.arange(1003.0) / 100)
    inner = torch.optim.AdamW([parameter], lr=0.1)
    return loco.PulseLoCo(inner, sync_every=H, topology=topology), parameter


def step(optimizer: loco.PulseLoCo, parameter: nn.Parameter) -> None:
    parameter.grad = torch.sin(torch.arange(1003.0) * (1 + optimizer.topology.site))
    optimizer.step()


def hold_the_lock(seconds: float) -> None:
    """As one long call into C does that does not release it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def trains(key: bytes | None, holder: str) -> Tensor:
    optimizer, parameter = built(key)
    while optimizer.round < ROUNDS:
        if os.environ["LOCO_SITE"] == holder and optimizer.round in (1, 2) and optimizer.local_step:
            hold_the_lock(3 * DEAD_AFTER)
        step(optimizer, parameter)
    return optimizer.outer_state.anchor.clone()


@pytest.mark.check(INTERRUPTIONS, sample="berlin-plain")
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
@pytest.mark.parametrize("holder", ["berlin", "paris"])
def test_who_holds_the_lock_is_waited_for(holder: str, key: bytes | None) -> None:
    """One of the two also hosts the store."""
    [berlin], [paris] = launch_worlds(trains, key, holder)
    assert torch.equal(berlin, paris)


def is_stopped_or_misses_it(key: bytes | None, folder: str) -> tuple[str, float]:
    optimizer, parameter = built(key)
    ready, pid = Path(folder) / "ready", Path(folder) / "pid"
    while optimizer.round < 2:
        step(optimizer, parameter)
    if os.environ["LOCO_SITE"] == "berlin":
        while not ready.exists():  # or the other one may still ask for the verdict on the last round
            time.sleep(0.01)
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", 0.0
    ready.touch()
    while not pid.exists():
        time.sleep(0.01)
    began = time.monotonic()
    told = error_of(lambda: [step(optimizer, parameter) for _ in range(H)])[1]
    seconds = time.monotonic() - began
    os.kill(int(pid.read_text()), signal.SIGCONT)
    return told, seconds


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
def test_who_is_stopped_is_missed_long_before_its_prepared_beats_are_used_up(
    key: bytes | None, tmp_path: Path
) -> None:
    _, [(told, seconds)] = launch_worlds(is_stopped_or_misses_it, key, str(tmp_path))
    of_either_host = "no heartbeat from site berlin|no answer from the sites' store"
    assert re.search(of_either_host, told)
    assert seconds < PREPARED * STEP / BEATS * DEAD_AFTER / 2


def holds_without_a_compiler() -> tuple[str, str]:
    os.environ["CC"] = "no-such-compiler"
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("loco").addHandler(handler)
    told = error_of(trains, None, "berlin")[1]
    return told, "\n".join(one for one in warnings if "interpreter lock" in one)


def test_without_a_compiler_it_is_missed_and_a_warning_has_said_so() -> None:
    [berlin], [paris] = launch_worlds(holds_without_a_compiler)
    assert "no heartbeat from site berlin" in paris[0]
    for _, warned in (berlin, paris):
        assert re.fullmatch(
            r"a rank counts as dead, .* holds Python's interpreter lock for longer than dead_after, 1 s, .*"
            r"no C compiler \(no-such-compiler\) was found.*",
            warned,
        )
