"""What one device does by itself, worked out from what is known of it; `measuring.py` measures it."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.pipeline.plan.config import PlanConfig
from experiments.pipeline.plan.memory import BF16, cache_bytes, for_cache

_TRAINING, _FORWARD = 6, 2  # floating-point operations for each parameter and token


@dataclass(frozen=True)
class Rates:
    """Seconds of one device, but where something else is said."""

    answer_tokens: float  # of an answer, the mean
    longest_tokens: float  # of the longest one
    slot_tokens: float  # steps for which an answer holds its place; those of the longest, if all wait for it
    token_s: float  # of a step that gives every answer of a batch a token, however many they are
    sequence_s: float  # more of it for each of them
    step_s: float  # of a training step, however many answers it learns from
    answer_s: float  # more of it for each of them
    round_s: float  # of a round, without its bytes' way
    publish_s: float  # of a version, at the site that publishes, before a thread writes it
    write_s: float  # until it is there
    round_bytes: float  # that a site sends in a round, and as many that it receives
    take_s: float = 0.0  # until a trainer has the samples of a step, if they are there
    lease_s: float = 0.0  # between two batches of a sampler, if it may go on
    shared_s: float = 1.0  # that a second of work takes where more parts than cores share these
    call_s: float = 0.0  # that each of these two calls adds there
    most_answers: float | None = None  # that fit into the memory of one device that samples

    def of_token(self, batch: float) -> float:
        return self.token_s + batch * self.sequence_s

    def of_batch(self, batch: float) -> float:
        """Of answers that begin together, until the last of them has its end."""
        return self.slot_tokens * self.of_token(batch)

    def of_longest(self, batch: float) -> float:
        """Between the first token of the longest answer and its last."""
        return self.longest_tokens * self.of_token(batch)


def worked_out(config: PlanConfig) -> Rates:
    """A token's step reads all weights once, and each sequence's keys and values, unless computing takes
    longer; training computes at the share of the peak that `utilisation` says."""
    gpu, target = config.gpu, config.target
    flops, bandwidth = gpu.tflops * 1e12 * gpu.utilisation, gpu.bandwidth_gb * 1e9
    kv = cache_bytes(config)
    context = target.prompt_tokens + target.answer_tokens / 2  # of a sequence, over its life
    token_s = BF16 * target.parameters / bandwidth if target.token_ms is None else target.token_ms / 1e3
    trained = target.prompt_tokens + target.answer_tokens
    of_token = _TRAINING * target.parameters / flops
    if target.trained_tokens_s is not None:
        of_token = 1 / target.trained_tokens_s
    return Rates(
        answer_tokens=target.answer_tokens,
        longest_tokens=target.longest_tokens,
        slot_tokens=target.answer_tokens,  # another takes its place
        token_s=token_s,
        sequence_s=max(kv * context / bandwidth, _FORWARD * target.parameters / flops),
        step_s=0.0,
        answer_s=trained * of_token,
        round_s=0.0,
        publish_s=0.0,
        write_s=0.0,
        round_bytes=target.round_bytes * target.parameters,
        most_answers=for_cache(config) / (kv * context),
    )
