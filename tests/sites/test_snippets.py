"""The programs in the documentation run as written. (The README's training loop has a test of its own.)"""

import os
import pathlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, code, named, page, sides
from selection import CHECKPOINTS, COMMANDS, FLEETS
from sites import free_port, run_ranks
from torch.nn.parallel import DistributedDataParallel

import loco


def names_for(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    known: dict[str, Any] = {"torch": torch, "loco": loco, "os": os, "pathlib": pathlib}
    return known | {"DistributedDataParallel": DistributedDataParallel, "model": model, "inner": inner}


def run_snippet(rank: int, source: str, folder: str) -> tuple[Any, ...]:
    """-> what is worth a look at the end: rounds done, entries recorded, checkpoints."""
    os.chdir(folder)
    known = names_for(rank)
    if "optimizer = " not in source:
        known["optimizer"] = loco.PulseLoCo(known["inner"], sync_every=1)
    exec(source.replace(", 1000)", ", 200)"), known)  # a page's own, whose training loop is cut short
    handle = known.get("handle")
    optimizer = handle if isinstance(handle, loco.Attached) else known["optimizer"]
    inner = optimizer.inner
    for p in known["model"].parameters():
        p.grad = torch.ones_like(p)
    inner.step()
    report = optimizer.sync()
    return optimizer.round, report.entries, known.get("densities"), optimizer.topology.num_sites


def snippets() -> list[Any]:
    found = [
        (named(path), k, *one)
        for path in PAGES
        if path.name != "sync.md"  # tests/sync/test_sync_page.py
        for k, one in enumerate(code(path.read_text(), "python"))
    ]
    return [
        pytest.param(said, source, id=f"{name}-{k}") for name, k, said, source in found if "line" not in said
    ]


@pytest.mark.check(COMMANDS, sample=r"(README|docs/sites)\.md.*")
@pytest.mark.parametrize(("said", "source"), snippets())
def test_every_snippet_runs(said: str, source: str, tmp_path: Path) -> None:
    assert not said or re.fullmatch(r"on \d ranks", said)
    world = int(said.split()[1]) if said else 2
    (tmp_path / "loco.key").write_bytes(b"0123456789abcdef")
    for rounds, entries, densities, sites in run_ranks(world, run_snippet, source, str(tmp_path)):
        assert rounds >= 1
        assert entries > 0
        assert densities is None or len(densities) == 1  # the hook was called once, and then removed
        assert sites == 2


def trained(rank: int, folder: str) -> int:
    os.chdir(folder)
    known = names_for(rank)
    optimizer = loco.PulseLoCo(known["inner"], sync_every=2)
    torch.manual_seed(rank)
    for _ in range(3):  # into the second round, so that who leaves leaves something
        known["model"](torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    with loco.Checkpoints("checkpoints") as checkpoints:
        checkpoints.save(optimizer, {"step": 3})
    return optimizer.round


def resized(rank: int, line: str, folder: str) -> tuple[int, int, Any]:
    os.chdir(folder)
    known = names_for(rank)
    optimizer = loco.PulseLoCo(known["inner"], sync_every=2)
    with loco.Checkpoints("checkpoints") as checkpoints:
        resumed = eval(line, {"checkpoints": checkpoints, "optimizer": optimizer})
    return resumed.round, resumed.local_step, resumed.extra


def resizing() -> list[tuple[str, int]]:
    ((_, source),) = [one for one in code(page("docs/checkpoints.md"), "python") if "line" in one[0]]
    lines = [line.partition("  # on ") for line in source.splitlines()]
    return [(line, int(comment.split()[0])) for line, _, comment in lines]


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize(("line", "ranks"), resizing())
def test_every_way_to_go_on_with_another_number_of_sites(line: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(4, trained, str(tmp_path)) == [1] * 4
    assert run_ranks(ranks, resized, line, str(tmp_path)) == [(1, 1, {"step": 3})] * ranks


@pytest.mark.check(FLEETS)
def test_the_training_loop_of_sites_that_come_and_go_is_the_readmes_and_runs(tmp_path: Path) -> None:
    ((_, of_readme),) = code(page("README.md"), "diff")
    ((_, diff),) = code(page("docs/elastic.md"), "diff")
    before, after = sides(diff)
    common = sides(of_readme)[1].partition("\nprint(")[0]
    assert before == common
    assert "optimizer.round < 1000" in after
    after = after.replace("optimizer.round < 1000", "optimizer.round < 3")
    (tmp_path / "train.py").write_text(after + "\nprint(optimizer.last_report)\n")
    where = f"127.0.0.1:{free_port()}"
    launch = next(text for _, text in code(page("docs/elastic.md"), "sh") if "SITE=" in text)
    launch = launch.replace("10.0.0.1:29510", where).replace("SITES=4", "SITES=2")
    assert f"LOCO_AT={where} LOCO_AT_LEAST=2 " in launch
    assert "LOCO_SITE=berlin " in launch
    assert "DATA=0 python" in launch
    sites = [
        subprocess.Popen(
            [
                "bash",
                "-c",
                launch.replace("SITE=berlin", f"SITE={name}").replace(
                    "DATA=0 python", f"DATA={seed} exec {sys.executable}"
                ),
            ],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed, name in enumerate(["berlin", "oslo"])
    ]
    try:
        for site in sites:
            said, _ = site.communicate(timeout=120)
            assert site.returncode == 0, said
            assert "round 3: sent " in said
    finally:
        for site in sites:
            site.kill()
