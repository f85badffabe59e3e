"""The rows of `fault_rows`, played.

This plays all of them and prints the table of docs/failures.md:

    PYTHONPATH=.:tests/support/running python tests/support/failing/fault_cases.py
"""

import signal
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from disks import small_disk
from fault_harness import Run, Told
from fault_row import AGAIN, REFUSED, RESTARTS, Case
from fault_rows import ROWS, table
from fault_site import Setup
from faulty import Fault


@dataclass(frozen=True)
class Played:
    told: Told
    clean: Told  # the same without a fault
    restarted: Told | None = None  # from the checkpoints


def play(case: Case, folder: Path) -> Played:
    """Let it happen, do what there is to do about it, and go on to the end.

    By `flow`: "resume" continues who was stopped, once all others have raised; "restart" starts all anew from
    checkpoints; "link" mends the link, once all have raised; "store" strikes the store's host instead, while
    the others wait for the victims; "refuse" ends; in all others the ranks repeat what failed.
    """
    row, setup = case.row, case.row.setup
    phase = "inner step" if case.phase.startswith("as the") else case.phase
    what = "late" if row.flow == "store" else row.what
    faults = [Fault(what, phase, rank, seconds=row.seconds) for rank in row.victims]
    if phase in AGAIN:
        faults.insert(0, Fault("closed", "payload", rank=0))
    saves = row.afterwards in RESTARTS or phase == "checkpoint"
    with small_disk(folder / "1", "256k") if row.what == "full disk" else nullcontext():
        with Run(setup, faults, folder=str(folder) if saves else "") as run:
            _go_on(run, case)
        restarted = None
        if row.afterwards in RESTARTS:
            with Run(setup, folder=str(folder)) as again:
                again.finish()
            restarted = again.told
    # Worlds of their own train as one does, bit for bit.
    return Played(run.told, clean(replace(setup, networks=False, worlds=False)), restarted)


def _go_on(run: Run, case: Case) -> None:
    row = case.row
    all_ranks = range(row.setup.world)
    others = [rank for rank in all_ranks if rank not in row.victims]
    if case.phase in AGAIN:
        run.all_raised(all_ranks)
        if case.phase == "reconnecting":  # who comes last to a meeting does not wait there
            run.again(row.victims)
            run.until(lambda: set(row.victims) <= set(run.told.struck))
        run.again()
    if row.flow in ("resume", "restart"):
        run.all_raised(others)
    if row.flow == "resume":
        for victim in row.victims:
            run.send(victim, signal.SIGCONT)
    if row.flow == "store":
        run.until(lambda: set(row.victims) <= set(run.told.struck))
        run.send(-1, signal.Signals[row.what])
    if row.flow in ("link", "store", "refuse"):
        run.all_raised(all_ranks)
    if row.flow == "link":
        run.link_is_back(row.victims[0])
    if row.flow == "store" and row.what == "SIGSTOP":
        run.send(-1, signal.SIGCONT)
    if row.afterwards in (*RESTARTS, REFUSED):
        run.end()
    else:
        run.finish()


@cache
def clean(setup: Setup) -> Told:
    """The same script without a fault."""
    with Run(setup) as run:
        run.finish()
    return run.told


def main() -> None:
    seconds: dict[int, list[float]] = {}
    for number, row in enumerate(ROWS):
        for phase in row.phases:
            with tempfile.TemporaryDirectory() as folder:
                told = play(Case(row, phase), Path(folder)).told
            if row.says:
                ranks = row.by or [rank for rank in told.raised if told.since(rank, row.victims)]
                times = [told.within(rank, row.victims) for rank in ranks]
                seconds.setdefault(number, []).extend(times)
    print(table(seconds))


if __name__ == "__main__":
    main()
