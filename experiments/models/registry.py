"""The model that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from experiments.models.model import ByteTransformer
from experiments.settings.config import RunConfig


def language_model(config: RunConfig) -> nn.Module:
    """The model that the configuration asks for; see `experiments.tasks.rollout.PublishedModel`."""
    if config.model == "hf":
        from experiments.models.huggingface import HuggingFaceModel  # an optional dependency, slow to import

        assert config.path is not None
        return HuggingFaceModel(Path(config.path))
    return ByteTransformer(config.transformer)
