"""torchtitan's own trainer, by an optimizers container and configs only."""

import os
import shutil
from pathlib import Path

import torch
from claims import ended_alike, learned_separately, resumed, sent_its_rounds_only
from sites import free_port, launch_worlds
from tiny import Told, finish, watch

H = 4


def titan_site(folder: str) -> Told:
    import titan  # before anything else of torchtitan, which learns its device when it is imported

    from loco.integrations.torchtitan import LocoOptimizersContainer

    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    config = titan.config(folder)
    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=H)
    trainer = config.build()
    titan.let_gloo_reduce(trainer)
    handle = trainer.optimizers.handle
    told = watch(handle)
    trainer.train()
    if handle.local_step:
        handle.sync()
    finish(told, handle)
    trainer.close()
    return told


def test_two_trainers_are_two_sites_and_resume_bit_for_bit(tmp_path: Path) -> None:
    (berlin,), (paris,) = whole = launch_worlds(titan_site, str(tmp_path))
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    for name in ("berlin", "paris"):
        assert (tmp_path / name / "checkpoint" / "step-6").is_dir()
        shutil.rmtree(tmp_path / name / "checkpoint" / "step-10")
    for again, expected in zip(launch_worlds(titan_site, str(tmp_path)), whole, strict=True):
        resumed(again[0], expected[0], after=6)
    assert not torch.equal(berlin.outer["residual"], paris.outer["residual"])
