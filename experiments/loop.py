"""The training loop: one for all methods and tasks. Only what `methods.build` and the task return differs."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments import machine
from experiments.config import RunConfig
from experiments.gathering import from_all
from experiments.keeping import Keeper, Measured, Saving
from experiments.ledger import ring_all_reduce_bytes
from experiments.meter import Meter, reports_of
from experiments.methods import Trainee, build
from experiments.plan import Run
from experiments.progress import Progress
from experiments.results import Evaluation, Result, Round
from experiments.tasks import Seat, Task

_METERED = (
    "sent_bytes",
    "received_bytes",
    "accounted_bytes",
    "exchange_seconds",
    "round_seconds",
    "step_seconds",
    "rollout_seconds",
)


def train(
    run: Run,
    task: Task,
    start: dict[str, Tensor],
    seat: Seat,
    *,
    label: str,
    saving: Saving | None = None,
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
    meter = Meter(seat.device, computed_bytes_per_step=per_step)
    measured = Measured()
    keeper = Keeper(saving, run, trainee, model, seat, meter, measured) if saving else None
    if keeper is None or not keeper.resume():
        measured.add(0, evaluate(task, model, seat), sent_bytes=0)
    began -= measured.seconds
    score = measured.evaluations[-1][task.metric]

    with Progress(label, total=config.steps, done=measured.step, shown=seat.rank == 0) as progress:
        for step in range(measured.step + 1, config.steps + 1):
            if (step - 1) % config.sync_every == 0:
                with meter.rollouts():
                    reward = task.begin_round(model, (step - 1) // config.sync_every)
                if reward is not None:
                    measured.rewards.append(reward)
            # One step before the last, because the last one may end a round.
            seen_before = bf16_weights(model) if step == max(1, config.steps - 1) else None
            take_step(step, run, task, trainee, model, meter)
            if seen_before is not None:
                changed = (bf16_weights(model) != seen_before).sum().item()
                measured.one_step_density = changed / numel
            if step % config.eval_every == 0 or step == config.steps:
                measured.add(step, evaluate(task, model, seat), sent_bytes=meter.sent_bytes)
                score = measured.evaluations[-1][task.metric]
            measured.step, measured.seconds = step, time.perf_counter() - began
            if keeper is not None:
                keeper.after_step()
            progress.advance(f"{task.metric} {score:.4f}")
    if keeper is not None:
        keeper.close()

    mine: dict[str, Any] = {
        "curve": measured.curve,
        "rewards": measured.rewards,
        "reports": meter.state()["reports"],
        "kernel_sent": meter.kernel.sent if meter.kernel else None,
        "one_step_density": measured.one_step_density,
    }
    ranks = from_all(mine | {name: getattr(meter, name) for name in _METERED})
    alone = config.method in ("single", "ddp")
    sites = len(ranks) // (1 if alone else config.ranks_per_site)
    kernel = [one["kernel_sent"] for one in ranks]
    points = zip(*(one["curve"] for one in ranks), strict=True)
    rounds = zip(*(reports_of(one["reports"]) for one in ranks), strict=True)
    return Result(
        label=run.label,
        config=run.stored(),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        ranks=len(ranks),
        sites=sites,
        parameters=numel,
        evaluations=tuple(
            Evaluation(step=at[0][0], scores=scores, sent_bytes=fmean(sent for _, sent in at))
            for scores, at in zip(measured.evaluations, points, strict=True)
        ),
        rewards=tuple(fmean(at) for at in zip(*(one["rewards"] for one in ranks), strict=True)),
        rounds=tuple(
            Round.joined(at[0][0], [r for _, r, _ in at], [seen for *_, seen in at], sites=sites)
            for at in rounds
        ),
        bytes_source=meter.source,
        kernel_sent_bytes=None if None in kernel else fmean(kernel),
        seconds=time.perf_counter() - began,
        machine=machine.describe(seat.device),
        **{name: fmean(one[name] for one in ranks) for name in ("one_step_density", *_METERED)},
    )


def take_step(step: int, run: Run, task: Task, trainee: Trainee, model: nn.Module, meter: Meter) -> None:
    """One inner step, and the round that it may end."""
    config, optimizer = run.config, trainee.optimizer
    warm_up(optimizer, step, config)
    before = getattr(optimizer, "last_report", None)
    meter.begin()
    optimizer.zero_grad()
    task.loss(trainee.module, step).backward()
    waited = trainee.wait.seconds() if trainee.wait else 0.0
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    report = getattr(optimizer, "last_report", None)
    report = report if report is not before else None
    meter.end(waited=waited, report=report, watched=trainee.observer.seconds if trainee.observer else 0.0)
    if report is not None:
        seen = trainee.observer.after_round() if trainee.observer else None
        meter.reports.append((step, report, seen))


def warm_up(optimizer: torch.optim.Optimizer, step: int, config: RunConfig) -> None:
    """From 0 to the learning rate in the first steps."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * min(1.0, step / max(1, config.warmup))


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
