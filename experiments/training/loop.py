"""The training loop: one for all methods and tasks. Only what `methods.build` and the task return differs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.methods.methods import Trainee, build
from experiments.processes.progress import Progress
from experiments.reporting import machine
from experiments.reporting.results import Evaluation, Result, Round
from experiments.settings.config import RunConfig
from experiments.settings.plan import Run
from experiments.tasks.task import Seat, Task
from experiments.training.gathering import from_all
from experiments.training.keeping import Keeper, Saving
from experiments.training.ledger import ring_all_reduce_bytes
from experiments.training.meter import Meter


def train(
    run: Run, task: Task, start: dict[str, Tensor], seat: Seat, *, label: str, saving: Saving | None = None
) -> Result:
    """Train from the weights `start`, or from where `saving` says that the run was stopped. Every rank calls
    this together and gets the same result."""
    config, began = run.config, time.perf_counter()
    model = task.model()
    model.load_state_dict(start)
    model.to(seat.device, getattr(torch, config.parameters))
    trainee = build(model, config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    per_step = ring_all_reduce_bytes(numel, seat.ranks) if config.method == "ddp" else 0
    meter = Meter(seat.device, computed_bytes_per_step=per_step, overlaps=config.overlap is not None)
    keeper = Keeper(saving, run, trainee, model, seat, meter) if saving else None

    def score(step: int) -> None:
        with shown(trainee, config):
            scores = evaluate(task, model, seat)
        point = {"scores": scores, "sent_bytes": meter.summary()["sent_bytes"]}
        meter.found.evaluations.append({"step": step, **point})

    if keeper is None or not keeper.resume():
        score(0)
    found = meter.found
    began -= found.seconds
    with Progress(label, total=config.steps, done=found.step, shown=seat.rank == 0) as progress:
        for step in range(found.step + 1, config.steps + 1):
            if (step - 1) % config.sync_every == 0:
                with meter.rollouts():
                    reward = task.begin_round(model, (step - 1) // config.sync_every)
                if reward is not None:
                    found.rewards.append(reward)
            # One step before the last, because the last one may end a round.
            seen_before = bf16_weights(model) if step == max(1, config.steps - 1) else None
            take_step(step, config, task, trainee, model, meter)
            if seen_before is not None:
                found.one_step_density = (bf16_weights(model) != seen_before).sum().item() / numel
            if step == config.steps and config.overlap is not None:
                land(trainee, meter, step)
            if step % config.eval_every == 0 or step == config.steps:
                score(step)
            found.step, found.seconds = step, time.perf_counter() - began
            if keeper is not None:
                keeper.after_step()
            progress.advance(f"{task.metric} {found.evaluations[-1]['scores'][task.metric]:.4f}")
    if keeper is not None:
        keeper.close()

    mine = {"evaluations": found.evaluations, "rewards": found.rewards, "rounds": found.rounds}
    ranks = from_all(mine | meter.summary())
    sites = len(ranks) // (1 if config.method in ("single", "ddp") else config.ranks_per_site)
    evaluations, rewards, rounds = (list(zip(*(one[name] for one in ranks), strict=True)) for name in mine)
    sums = {name: [one[name] for one in ranks] for name in meter.summary() if name != "bytes_source"}
    means: dict[str, Any] = {k: None if None in values else fmean(values) for k, values in sums.items()}
    return Result(
        label=run.label,
        config=run.stored(),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        ranks=len(ranks),
        sites=sites,
        parameters=numel,
        evaluations=tuple(
            Evaluation(**at[0] | {"sent_bytes": fmean(one["sent_bytes"] for one in at)}) for at in evaluations
        ),
        rewards=tuple(fmean(at) for at in rewards),
        rounds=tuple(Round.joined(at, sites=sites) for at in rounds),
        bytes_source=ranks[0]["bytes_source"],
        seconds=time.perf_counter() - began,
        machine=machine.describe(seat.device),
        **means,
    )


def take_step(
    step: int, config: RunConfig, task: Task, trainee: Trainee, model: nn.Module, meter: Meter
) -> Tensor:
    """One inner step, and the round that it may end. Returns the step's loss."""
    optimizer = trainee.optimizer
    warm_up(optimizer.param_groups, step, config)
    before = getattr(optimizer, "last_report", None)
    meter.begin()
    optimizer.zero_grad()
    loss = task.loss(trainee.module, step)
    loss.backward()
    waited = trainee.wait.seconds() if trainee.wait else 0.0
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    report = getattr(optimizer, "last_report", None)
    report = report if report is not before else None
    meter.end(waited=waited, report=report, watched=trainee.observer.seconds if trainee.observer else 0.0)
    if report is not None:
        meter.found.rounds[-1] |= {"step": step} | (
            trainee.observer.after_round() if trainee.observer else {}
        )
    return loss.detach()


def warm_up(groups: list[dict[str, Any]], step: int, config: RunConfig) -> None:
    """From 0 to the learning rate in the first steps."""
    for group in groups:
        group["lr"] = config.lr * min(1.0, step / max(1, config.warmup))


def land(trainee: Trainee, meter: Meter, step: int) -> None:
    """Rounds that overlap are one behind: at the end all of them count."""
    optimizer: Any = trainee.optimizer
    hook = optimizer.register_report_hook(meter.add)
    optimizer.sync()
    hook.remove()
    for one in meter.found.rounds:
        one.setdefault("step", step)


@contextmanager
def shown(trainee: Trainee, config: RunConfig) -> Iterator[None]:
    """The weights that all sites agree on: where rounds overlap, each site is ahead of them at all times."""
    optimizer: Any = trainee.optimizer
    if config.overlap is None:
        yield
        return
    optimizer.eval()
    yield
    optimizer.train()


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, seat: Seat) -> dict[str, float]:
    """The held-out set's scores, on all ranks the same."""
    scores = {}
    for name, total in task.scores(model).items():
        if seat.ranks > 1:
            dist.all_reduce(total)
        scores[name] = (total[0] / total[1]).item()
    return scores


def bf16_weights(model: nn.Module) -> Tensor:
    """All weights as the forward pass sees them."""
    return torch.cat([p.detach().flatten().to(torch.bfloat16) for p in model.parameters()])
