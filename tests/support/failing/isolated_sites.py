"""Sites of one process each, in networks of their own behind a switch."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sites import context
from switch import Switch, run_first

from experiments.processes.namespaces import leave_network

MEETING = 29510  # port of LOCO_AT


def run_in_networks(
    switch: Switch,
    variables: Mapping[str, Mapping[str, str]],
    work: Callable[..., Any],
    *args: Any,
    waits_for_others: bool = True,
) -> list[Any]:
    """`work(*args)` on sites with these variables, by name -> what it returned, by site.

    Args:
        waits_for_others: for a core. False: as of `run_first`.
    """
    common = {"LOCO_SITES": str(len(variables)), "LOCO_AT": f"10.0.0.1:{MEETING}"}
    ends, processes = [], []
    try:
        for name, own in variables.items():
            ours, theirs = context.Pipe()
            told = common | {"LOCO_SITE": name} | dict(own)
            given = (work, told, args, waits_for_others, theirs)
            process = context.Process(target=_live, args=given, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
            assert ours.recv() == "left"
            switch.attach(process.pid or 0)
        for end in ends:
            end.send("attached")
        return [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _live(
    work: Callable[..., Any],
    variables: Mapping[str, str],
    args: tuple[Any, ...],
    waits_for_others: bool,
    end: Any,
) -> None:
    leave_network()
    if not waits_for_others:
        run_first()
    end.send("left")
    end.recv()
    os.environ.update(variables)
    torch.set_num_threads(1)
    end.send(work(*args))
    end.recv()
