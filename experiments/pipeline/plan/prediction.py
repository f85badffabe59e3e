"""How fast a layout is, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.plan.rates import Rates


@dataclass(frozen=True)
class Layout:
    """Who works beside whom, and at what."""

    sites: int
    ranks: int  # of a site
    samplers: int
    batch: float  # answers that a sampler works on at once
    step_answers: float  # that a rank learns from in a step
    sync_every: int
    max_staleness: int
    cores: int | None = None  # that all of them share; None: each has a device of its own
    link: float | None = None  # bytes a second, between a site and the others
    overlaps: bool = False  # rounds travel while sites train

    @staticmethod
    def of(config: PipelineConfig, *, cores: int | None, link: float | None) -> Layout:
        group = config.grpo.group
        return Layout(
            sites=config.sites,
            ranks=config.ranks_per_site,
            samplers=config.workers,
            batch=min(config.lease, config.quota) * group,
            step_answers=config.grpo.prompts * group,
            sync_every=config.sync_every,
            max_staleness=config.max_staleness,
            cores=cores,
            link=link,
            overlaps=config.overlap is not None,
        )

    @property
    def answers(self) -> float:
        """That a round learns from."""
        return self.sync_every * self.sites * self.ranks * self.step_answers

    @property
    def batches(self) -> float:
        """In which those answers are sampled."""
        return self.answers / self.batch

    @property
    def parts(self) -> int:
        return self.sites * self.ranks + self.samplers

    @property
    def calls(self) -> float:
        """In a round: one for each step of each rank, and one for each batch of answers."""
        return self.sync_every * self.sites * self.ranks + self.batches


@dataclass(frozen=True)
class Prediction:
    round_s: float
    bounds: dict[str, float]  # seconds a round that each of them alone would allow
    bound: str  # which of them decides
    answers_s: float  # that are sampled, and learned from, in a second
    staleness: float  # versions, of the longest answer
    age: float  # versions, of a token when it is learned from, the mean


def training_of(rates: Rates, layout: Layout) -> float:
    """Seconds in which one rank computes, of a round."""
    return layout.sync_every * (rates.step_s + rates.answer_s * layout.step_answers) + rates.round_s


def work_of(rates: Rates, layout: Layout) -> float:
    """Seconds in which all parts together compute, of a round."""
    sampling = layout.batches * rates.of_batch(layout.batch)
    return layout.sites * layout.ranks * training_of(rates, layout) + rates.publish_s + sampling


def predict(rates: Rates, layout: Layout) -> Prediction:
    link_s = rates.round_bytes / layout.link if layout.link else 0.0
    training = training_of(rates, layout) + layout.sync_every * rates.take_s
    batch_s = rates.of_batch(layout.batch) + rates.lease_s
    most = (1 + layout.max_staleness) * layout.batches  # batches out at once
    at_work = min(layout.samplers, most)
    waited_s = 0.0 if layout.overlaps else link_s
    bounds = {"training": training + waited_s + rates.publish_s}
    bounds["sampling"] = layout.batches * batch_s / at_work
    if layout.cores is not None:
        shared = rates.shared_s * work_of(rates, layout) + rates.call_s * layout.calls
        bounds["cores"] = shared / min(layout.cores, layout.parts)
    if link_s > training:
        bounds["links"] = max(bounds.pop("training"), link_s)
    # Where samplers are ahead, each new version lets them sample what is learned from so many versions later.
    are_ahead = bounds.get("links", bounds.get("training", 0.0)) >= bounds["sampling"]
    bound = max(bounds, key=lambda name: bounds[name])
    round_s = bounds[bound]
    if layout.max_staleness == 0:  # the first batch is there before training begins, then both go on
        waves = math.ceil(layout.batches / at_work) * batch_s
        between = link_s + rates.publish_s + rates.write_s
        in_turn = {
            "training": batch_s + training + between,
            "sampling": waves + training / layout.sync_every + between,
        }
        bound = max(in_turn, key=lambda name: in_turn[name])
        if in_turn[bound] > round_s:
            round_s, bounds, bound = in_turn[bound], bounds | in_turn, f"turns, {bound}"
    longest = rates.of_longest(layout.batch) / round_s if layout.max_staleness else 0.0
    return Prediction(
        round_s=round_s,
        bounds=bounds,
        bound=bound,
        answers_s=layout.answers / round_s,
        staleness=longest,
        age=layout.max_staleness if are_ahead else min(layout.max_staleness, 0.5 + longest),
    )
