"""Rounds in torchtitan, by its configs only.

    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=8)
    config.validator = LocoValidator.of(config.validator)
    config.metrics = LocoMetricsProcessor.of(config.metrics)
    trainer = config.build()

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator

import loco

from .trainers.one_site import topology_of_one_world

# By the first part of the model, which is all that a validator is told.
_handles: WeakKeyDictionary[nn.Module, loco.Attached] = WeakKeyDictionary()


class LocoOptimizersContainer(OptimizersContainer):
    """torchtitan's optimizers, which make one round together.

    Its checkpoints have the rounds of every rank, and loading one continues bit for bit.

    Attributes:
        handle: what `loco.attach` returned.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        loco: dict[str, Any] = field(default_factory=dict)
        """The arguments of loco.attach. `topology` is loco.Sites() unless it is among them."""

    @classmethod
    def of(cls, config: OptimizersContainer.Config, **options: Any) -> "LocoOptimizersContainer.Config":
        """`config` with rounds.

        Args:
            options: as for `loco.attach`: `sync_every`, `method`, `topology` and so on.
        """
        return cls.Config(**_fields_of(config), loco=options)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        options = dict(config.loco)
        topology = topology_of_one_world(options.pop("topology", None))
        several = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.handle = loco.attach(several, topology=topology, in_state_dict=False, **options)
        _handles[model_parts[0]] = self.handle

    def state_dict(self) -> dict[str, Any]:
        """Flat, as torchtitan's; and this rank's rounds, under a key that no other rank has."""
        return super().state_dict() | {self._key: self.handle.state_dict()["loco"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.handle.load_state_dict({**self.handle.inner.state_dict(), "loco": state_dict[self._key]})

    @property
    def _key(self) -> str:
        return f"loco.rank{dist.get_rank()}"


class LocoValidator(Validator):
    """torchtitan's validator, on cast(θ): its own would see each site's weights, between two rounds."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    @classmethod
    def of(cls, config: Validator.Config) -> "LocoValidator.Config":
        return cls.Config(**_fields_of(config))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        handle = _handle_of(model_parts)
        handle.eval()
        try:
            super().validate(model_parts, step)
        finally:
            handle.train()


class LocoMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics, and beside them those of the latest round, once."""

    _logged = 0

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    @classmethod
    def of(cls, config: MetricsProcessor.Config) -> "LocoMetricsProcessor.Config":
        return cls.Config(**_fields_of(config))

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        assert self.model_parts is not None
        handle = _handle_of(self.model_parts)
        extra = dict(extra_metrics or {})
        if handle.round != self._logged:
            self._logged = handle.round
            extra |= handle.metrics()
        super().log(*args, extra_metrics=extra, **kwargs)


def _handle_of(model_parts: list[nn.Module]) -> loco.Attached:
    """
    Raises:
        ValueError: there are no rounds.
    """
    handle = _handles.get(model_parts[0])
    if handle is None:
        raise ValueError("this model has no rounds: config.optimizer must be LocoOptimizersContainer.of(…)")
    return handle


def _fields_of(config: Any) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}
