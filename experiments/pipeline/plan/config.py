"""What to plan for: this machine, or GPUs of which something is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.settings.checks import require


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """The defaults are an H100's."""

    memory_gb: float = 80.0
    bandwidth_gb: float = 3350.0  # of its memory, a second
    tflops: float = 990.0  # BF16, the data sheet's
    utilisation: float = 0.4  # the share of it that training reaches

    def __post_init__(self) -> None:
        _positive(self, "gpu.")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The model and the answers to plan for; the defaults are Llama 3.1 8B's, and long answers."""

    parameters: float = 8.03e9
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    prompt_tokens: float = 300.0
    answer_tokens: float = 1500.0  # the mean
    longest_tokens: float = 8192.0
    answers: int = 512  # that a site learns from in a step
    round_bytes: float = 0.19  # of a parameter, that a site sends in a round; docs/frontier.md
    state_bytes: float | None = None  # of a parameter, that training keeps on GPUs; None: worked out
    token_ms: float | None = None  # of a forward pass for one token; None: worked out
    trained_tokens_s: float | None = None  # that one GPU learns from; None: worked out

    def __post_init__(self) -> None:
        _positive(self, "target.")
        require(
            self.longest_tokens >= self.answer_tokens,
            f"target.longest_tokens must be at least target.answer_tokens, got {self.longest_tokens}",
        )


def _positive(config: Any, part: str) -> None:
    for name, value in vars(config).items():
        require(value is None or value > 0, f"{part}{name} must be > 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PipelineConfig):
    gpus: int = 0  # to be split; 0: the cores of this machine
    gpu: GpuConfig = field(default_factory=GpuConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    link_mbit: float | None = None  # of a site's link to the others; None: no bound
    against: str | None = None  # folder of a comparison that has been run

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gpus >= 0, f"gpus must be at least 0, got {self.gpus}")
        require(
            not (self.gpus and self.against), "runs on this machine are predicted without gpus: leave it out"
        )
        require(self.method != "ddp", "a plan is for sites that run rounds, not for method=ddp")
        link = self.link_mbit
        require(link is None or link > 0, f"link_mbit must be > 0, got {link}")

    @property
    def link(self) -> float | None:
        """Bytes a second."""
        return None if self.link_mbit is None else self.link_mbit * 1e6 / 8
