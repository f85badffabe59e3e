"""Sites of two ranks: DDP or FSDP2 inside each world, rounds between the ranks of the same number."""

import os
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, DistributedType, PartialState
from claims import evaluated_theta, resumed, same_bits, same_training
from sites import launch_worlds
from test_accelerate import accelerate_site
from test_accelerate import plain_site as accelerate_plainly
from test_lightning import fabric_site, lightning_site
from test_lightning import plain_site as lightning_plainly
from test_torchtitan import plain_site as titan_plainly
from test_torchtitan import titan_site
from test_trainer import plain_site as trainer_plainly
from test_trainer import trainer_site
from test_trl import grpo_site, kept_groups, sft_site
from test_trl import plain_site as sft_plainly
from tiny import Told


def learned(sites: list[list[Any]], *, shards: bool = False) -> None:
    """Each rank has its part of θ, the same at both sites, which went their own ways between rounds."""
    for berlin, paris in zip(*sites, strict=True):
        assert berlin.reports
        assert same_bits([berlin.outer["anchor"]], [paris.outer["anchor"]])
        assert same_bits(berlin.weights, paris.weights)
        for here, there in zip(berlin.reports, paris.reports, strict=True):
            assert here.update_norms == there.update_norms
            assert len(set(here.update_norms)) == 2
            assert here.sent_bytes > 0
    for one, other in sites:
        assert (one.steps == other.steps) is not shards
        assert same_bits(one.weights, other.weights) is not shards
        halves = one.outer["anchor"].numel() + other.outer["anchor"].numel()
        assert halves == sum(w.numel() for told in ((one, other) if shards else (one,)) for w in told.weights)


def went_on(again: list[list[Any]], whole: list[list[Any]]) -> None:
    for site, expected in zip(again, whole, strict=True):
        for found, before in zip(site, expected, strict=True):
            resumed(found, before, after=6)


def as_a_plain_loop(sites: list[list[Any]], plain: list[list[Any]]) -> None:
    for site, expected in zip(sites, plain, strict=True):
        for found, rank in zip(site, expected, strict=True):
            same_training(found, rank)


def saw_theta(sites: list[list[Any]]) -> None:
    for told in chain(*sites):
        evaluated_theta(told)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}])
def test_the_trainer_with_ddp_inside_a_site(options: dict[str, Any], tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3} | options
    whole = launch_worlds(trainer_site, str(tmp_path), more, ranks=2)
    learned(whole)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(trainer_plainly, options, ranks=2))
    went_on(launch_worlds(trainer_site, str(tmp_path), more, "checkpoint-6", ranks=2), whole)


def test_sft_with_ddp_inside_a_site(tmp_path: Path) -> None:
    whole = launch_worlds(sft_site, str(tmp_path), "full", ranks=2)
    learned(whole)
    as_a_plain_loop(whole, launch_worlds(sft_plainly, "full", ranks=2))
    went_on(launch_worlds(sft_site, str(tmp_path), "full", True, ranks=2), whole)


def test_grpo_with_ddp_inside_a_site_keeps_groups_at_their_site(tmp_path: Path) -> None:
    whole = launch_worlds(grpo_site, str(tmp_path), "full", ranks=2)
    learned(whole)
    kept_groups(*chain(*whole))
    went_on(launch_worlds(grpo_site, str(tmp_path), "full", True, ranks=2), whole)


def test_accelerate_with_ddp_inside_a_site(tmp_path: Path) -> None:
    whole = launch_worlds(accelerate_site, str(tmp_path), ranks=2)
    learned(whole)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(accelerate_plainly, "no", ranks=2))
    went_on(launch_worlds(accelerate_site, str(tmp_path), "no", True, ranks=2), whole)


def test_lightning_with_ddp_inside_a_site(tmp_path: Path) -> None:
    pair = {"devices": 2, "strategy": "ddp"}
    whole = launch_worlds(lightning_site, str(tmp_path), pair, ranks=2)
    learned(whole)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(lightning_plainly, {}, ranks=2))
    went_on(launch_worlds(lightning_site, str(tmp_path), pair, True, ranks=2), whole)


def test_fabric_with_ddp_inside_a_site(tmp_path: Path) -> None:
    whole = launch_worlds(fabric_site, str(tmp_path), "32-true", ranks=2)
    learned(whole)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(lightning_plainly, {"gradient_clip_val": 0.5}, False, ranks=2))
    went_on(launch_worlds(fabric_site, str(tmp_path), "32-true", True, ranks=2), whole)


def test_torchtitan_with_two_shards_inside_a_site(tmp_path: Path) -> None:
    whole = launch_worlds(titan_site, str(tmp_path), ranks=2)
    learned(whole, shards=True)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(titan_plainly, str(tmp_path), ranks=2))
    for name in ("berlin", "paris"):
        shutil.rmtree(tmp_path / name / "checkpoint" / "step-10")
    went_on(launch_worlds(titan_site, str(tmp_path), ranks=2), whole)


def on_fsdp2(site: Any, *args: Any) -> Told:
    """As `accelerate launch` asks for it, and on CPUs, where Accelerate 1.15 would run DDP without a word."""
    begin = AcceleratorState.__init__

    def state_with_shards(self: AcceleratorState, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if options.get("fsdp_plugin") is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = options["fsdp_plugin"]

    AcceleratorState.__init__ = state_with_shards
    asked = {"USE_FSDP": "true"} if site is accelerate_site else {}
    os.environ.update({f"ACCELERATE_{name}": value for name, value in asked.items()})
    os.environ.update(FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    os.environ.update(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT", FSDP_CPU_RAM_EFFICIENT_LOADING="false")
    return site(*args)


def test_accelerate_with_fsdp2_inside_a_site(tmp_path: Path) -> None:
    whole = launch_worlds(on_fsdp2, accelerate_site, str(tmp_path), ranks=2)
    learned(whole, shards=True)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(accelerate_plainly, "no", True, ranks=2))
    went_on(launch_worlds(on_fsdp2, accelerate_site, str(tmp_path), "no", True, ranks=2), whole)


def test_the_trainer_with_fsdp2_inside_a_site(tmp_path: Path) -> None:
    shards = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    evaluates = {"eval_strategy": "steps", "eval_steps": 3}
    options = {"save_strategy": "steps", "save_steps": 3, **evaluates, **shards}
    whole = launch_worlds(on_fsdp2, trainer_site, str(tmp_path), options, ranks=2)
    learned(whole, shards=True)
    saw_theta(whole)
    as_a_plain_loop(whole, launch_worlds(trainer_plainly, {}, True, ranks=2))
    went_on(launch_worlds(on_fsdp2, trainer_site, str(tmp_path), options, "checkpoint-6", ranks=2), whole)
