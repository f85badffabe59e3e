"""docs/internals.md names every key of the store and every thread, and none that is not there."""

import os
import re
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from pages import page, table
from sites import run_ranks, run_worlds
from torch._C._distributed_c10d import TCPStore

import loco


def seen_in_a_run(rank: int, folder: str) -> tuple[set[str], set[str]]:
    """Keys and threads of a run that saves, loses its links and makes new ones; two sites of two ranks."""
    keys: set[str] = set()
    threads: set[str] = set()

    def look(_: object = None) -> None:
        keys.update(dist.distributed_c10d._get_default_store().list_keys())
        threads.update(thread.name for thread in threading.enumerate())

    def keep_looking() -> None:  # some threads live as long as one wait
        while not over.wait(0.0005):
            threads.update(thread.name for thread in threading.enumerate())

    over = threading.Event()
    looking = threading.Thread(target=keep_looking)
    looking.start()
    struck: list[loco.RoundProgress] = []

    def interrupt(progress: loco.RoundProgress) -> None:
        if rank == 1 and progress.phase == "received" and not struck:
            struck.append(progress)
            raise KeyboardInterrupt

    model = torch.nn.Linear(1024, 1024)  # large enough for messages that a thread moves
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = loco.PulseLoCo(inner, sync_every=1, topology=loco.Topology(ranks_per_site=2))
    optimizer.register_round_hook(look)
    optimizer.step()
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)
        look()
    optimizer.register_round_hook(interrupt)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        look()  # before new links replace what was given up
        optimizer.sync()
    look()
    over.set()
    looking.join()
    return keys, threads


def seen_at_a_meeting(rank: int) -> set[str]:
    """Keys in the store at the sites' address, and in that of this site's own world."""
    inner = torch.optim.SGD(torch.nn.Linear(8, 8).parameters(), lr=1e-3)
    loco.PulseLoCo(inner, topology=loco.Sites()).sync()
    host, port = os.environ["LOCO_AT"].split(":")
    keys = set(TCPStore(host, int(port), is_master=False).list_keys())
    return keys | {key for key in dist.distributed_c10d._get_default_store().list_keys() if "joined" in key}


def pattern(described: str) -> str:
    """Of what a row is about: <name> is anything without a slash, and … is anything."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(described).replace("…", ".+"))


def test_the_page_has_a_row_for_every_store_key_and_every_thread_and_no_other(tmp_path: Path) -> None:
    found = run_ranks(4, seen_in_a_run, str(tmp_path))
    keys = {key for of_rank, _ in found for key in of_rank if "loco" in key}
    threads = {name for _, of_rank in found for name in of_rank if "loco" in name}
    for head, seen in (("| key | value |", keys), ("| thread | started by |", threads)):
        rows = [pattern(row[0]) for row in table(page("docs/internals.md"), head)]
        assert not [one for one in seen if not any(re.fullmatch(row, one) for row in rows)]
        assert not [row for row in rows if not any(re.fullmatch(row, one) for one in seen)]


def test_the_page_has_a_row_for_every_key_by_which_sites_find_each_other() -> None:
    found = {key for site in run_worlds(["a", "b"], 2, seen_at_a_meeting) for keys in site for key in keys}
    keys = {key.removeprefix("default_pg/0//") for key in found}
    text = page("docs/internals.md")
    rows = [pattern(row[0]) for row in table(text, "| key before there is a session |")]
    later = ["sites/" + pattern(row[0]) for row in table(text, "| key | value |")]
    before = {key for key in keys if not any(re.fullmatch(row, key) for row in later)}
    assert not [one for one in before if not any(re.fullmatch(row, one) for row in rows)]
    assert not [row for row in rows if not any(re.fullmatch(row, one) for one in keys)]
