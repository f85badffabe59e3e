"""A training as a user writes it, for a site with a world of its own: restarted when it fails, it resumes.

FOLDER is the site's, and each rank says there, in a file of its own, what it does: the ranks of a torchrun
share a pipe, and with PYTHONUNBUFFERED a line is several writes, so their lines run into each other.
VICTIM ("b/0") is killed or stopped once, in round 5 at PHASE.
"""

import hashlib
import os
import signal
from pathlib import Path

import torch
from scripted import Scripted, parameters
from states import snapshot

import loco

STEPS, ROUNDS, STRUCK_IN = 2, 8, 5


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["FOLDER"])
    topology = loco.Sites(dead_after=2.0, patience=60.0)
    inner = Scripted(parameters(7, 2003), 3, topology.site)
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
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))

    optimizer.register_round_hook(strike)
    while optimizer.round < ROUNDS:
        optimizer.step()
        if optimizer.local_step == 1:
            checkpoints.save(optimizer, inner.count)
    checkpoints.wait()
    state = snapshot(optimizer)
    say("ended " + hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest())


if __name__ == "__main__":
    main()
