"""Rounds in torchtitan, by its configs only.

    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=8)
    trainer = config.build()

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state

import loco

from .one_site import topology_of_one_world


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
        given = {each.name: getattr(config, each.name) for each in fields(config)}
        return cls.Config(**given, loco=options)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            init_optim_state(optimizer)  # by a step, which must not count
        options = dict(config.loco)
        topology = topology_of_one_world(options.pop("topology", None))
        several = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.handle = loco.attach(several, topology=topology, in_state_dict=False, **options)

    def state_dict(self) -> dict[str, Any]:
        """Flat, as torchtitan's; and this rank's rounds, under a key that no other rank has."""
        return super().state_dict() | {self._key: self.handle.state_dict()["loco"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.handle.load_state_dict({**self.handle.inner.state_dict(), "loco": state_dict[self._key]})

    @property
    def _key(self) -> str:
        return f"loco.rank{dist.get_rank()}"
