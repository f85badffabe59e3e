"""The training loop: one for all methods. Only what `methods.build` returns differs."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.config import RunConfig
from experiments.data import Corpus, batch, evaluation_batches
from experiments.ledger import ring_all_reduce_bytes
from experiments.meter import Meter
from experiments.methods import Method, build
from experiments.model import ByteTransformer
from experiments.progress import Progress
from experiments.results import Evaluation, Result, Round

_METERED = (
    "sent_bytes",
    "received_bytes",
    "accounted_bytes",
    "exchange_seconds",
    "round_seconds",
    "step_seconds",
)


def run_method(
    method: Method, config: RunConfig, corpus: Corpus, start: dict[str, Tensor], device: torch.device
) -> Result:
    """Train from the weights `start`. Every rank calls this together and gets the same result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = config.model.context
    model = ByteTransformer(config.model)
    model.load_state_dict(start)
    model.to(device)
    trainee = build(method, model, config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    per_step = ring_all_reduce_bytes(numel, ranks) if method.name == "ddp" else 0
    meter = Meter(device, computed_bytes_per_step=per_step)
    held_out = evaluation_batches(corpus.held_out, sequences=config.data.eval_sequences, context=context)[
        rank::ranks
    ]
    losses = [evaluate(model, held_out, device)]
    curve: list[tuple[int, int]] = [(0, 0)]  # (step, bytes sent by then)
    one_step_density, report = 0.0, None

    with Progress(str(method), total=config.steps, shown=rank == 0) as progress:
        for step in range(1, config.steps + 1):
            sequences = batch(
                corpus.adapt,
                size=config.batch,
                context=context,
                seed=config.seed,
                rank=rank,
                ranks=ranks,
                step=step,
            ).to(device)
            # One step before the last, because the last one may end a round.
            seen_before = bf16_weights(model) if step == max(1, config.steps - 1) else None

            meter.begin()
            trainee.optimizer.zero_grad()
            trainee.module(sequences).backward()
            waited = trainee.wait.seconds() if trainee.wait else 0.0
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            trainee.optimizer.step()
            latest = getattr(trainee.optimizer, "last_report", None)
            meter.end(waited=waited, report=latest if latest is not report else None)
            report = latest

            if seen_before is not None:
                changed = (bf16_weights(model) != seen_before).sum().item()
                one_step_density = changed / numel
            if step % config.eval_every == 0 or step == config.steps:
                losses.append(evaluate(model, held_out, device))
                curve.append((step, meter.sent_bytes))
            progress.advance(f"loss {losses[-1]:.4f}")

    mine: dict[str, Any] = {
        "curve": curve,
        "reports": meter.reports,
        "kernel_sent": meter.kernel.sent if meter.kernel else None,
        "one_step_density": one_step_density,
    }
    mine |= {name: getattr(meter, name) for name in _METERED}
    everyone: list[dict[str, Any]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyone, mine)
    return _joined(method, config, numel, losses, everyone, source=meter.source)


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Tensor], device: torch.device) -> float:
    """Mean loss over the held-out text; `batches` is this rank's share of it. On all ranks the same."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # [loss · sequences, sequences]
    for sequences in batches:
        total[0] += model(sequences.to(device)).double() * len(sequences)
        total[1] += len(sequences)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def bf16_weights(model: nn.Module) -> Tensor:
    """All weights as the forward pass sees them."""
    return torch.cat([p.detach().flatten().to(torch.bfloat16) for p in model.parameters()])


def _joined(
    method: Method,
    config: RunConfig,
    numel: int,
    losses: list[float],
    everyone: list[dict[str, Any]],
    *,
    source: str,
) -> Result:
    """One result from what every rank measured."""

    def mean(name: str) -> float:
        return fmean(one[name] for one in everyone)

    sites = len(everyone) // (1 if method.name == "ddp" else config.ranks_per_site)
    kernel = [one["kernel_sent"] for one in everyone]
    points = zip(*(one["curve"] for one in everyone), strict=True)
    reports = zip(*(one["reports"] for one in everyone), strict=True)
    return Result(
        method=method,
        ranks=len(everyone),
        sites=sites,
        parameters=numel,
        steps=config.steps,
        evaluations=tuple(
            Evaluation(step=ranks[0][0], loss=loss, sent_bytes=fmean(sent for _, sent in ranks))
            for loss, ranks in zip(losses, points, strict=True)
        ),
        rounds=tuple(
            Round.joined(ranks[0][0], [report for _, report in ranks], sites=sites) for ranks in reports
        ),
        one_step_density=mean("one_step_density"),
        bytes_source=source,
        kernel_sent_bytes=None if None in kernel else fmean(kernel),
        **{name: mean(name) for name in _METERED},
    )
