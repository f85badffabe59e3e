"""A training as a user writes it, for a site with a world of its own: restarted when it fails, it resumes.

FOLDER is the site's, and each rank says there, in a file of its own, what it does: the ranks of a torchrun
share a pipe, and with PYTHONUNBUFFERED a line is several writes, so their lines run into each other.
VICTIM ("b/0") is killed or stopped once, in round 5 at PHASE, by SIGNAL; without one it sleeps there for some
seconds. PAUSE are seconds that a step takes.
"""

import faulthandler
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from scripted import Scripted, parameters
from states import Snapshot, snapshot

import loco

STEPS, STRUCK_IN = 2, 5
SLOW = 8.0  # seconds: four times what makes a site silent


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["FOLDER"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    topology = loco.Sites(dead_after=2.0, patience=60.0)
    inner = Scripted(parameters(7, 2003), 3, "ab".index(os.environ["LOCO_SITE"]))
    optimizer = loco.PulseLoCo(inner, sync_every=STEPS, topology=topology)
    checkpoints = loco.Checkpoints(folder / "checkpoints")
    resumed = checkpoints.load(optimizer)
    inner.count = resumed.extra if resumed else 0
    said = folder / f"said-{topology.rank_in_site}"

    def say(what: str) -> None:
        with said.open("a") as file:
            file.write(f"{what}\n")

    say(f"begins at round {optimizer.round}")
    is_victim = os.environ["VICTIM"] == f"{os.environ['LOCO_SITE']}/{topology.rank_in_site}"
    struck = folder / "struck"

    def strike(progress: loco.RoundProgress) -> None:
        if (
            is_victim
            and (progress.number, progress.phase) == (STRUCK_IN, os.environ["PHASE"])
            and not struck.exists()
        ):
            struck.touch()
            if os.environ["SIGNAL"]:
                os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
            time.sleep(SLOW)

    optimizer.register_round_hook(strike)
    while optimizer.round < int(os.environ["ROUNDS"]):
        time.sleep(float(os.environ["PAUSE"]))
        optimizer.step()
        if optimizer.local_step == 1:
            checkpoints.save(optimizer, inner.count)
    checkpoints.wait()
    state, report = snapshot(optimizer), optimizer.last_report
    assert report is not None
    say(f"last round of {len(report.update_norms)} sites, {hashed(state, 'anchor', 'momentum', 'weights')}")
    say(f"ended {hashed(state, *sorted(state))}")


def hashed(state: Snapshot, *names: str) -> str:
    return hashlib.sha256(b"".join(state[name].tobytes() for name in names)).hexdigest()


if __name__ == "__main__":
    main()
