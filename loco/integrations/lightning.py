"""Rounds in Lightning's Trainer, and in a loop of Fabric's.

    trainer = Trainer(callbacks=[LocoCallback(sync_every=8)])
    trainer.fit(module, loader)                     # `configure_optimizers` returns the inner optimizer

    model, optimizer = fabric.setup(model, optimizer)
    handle = attach(fabric, optimizer, sync_every=8)

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

import loco

from .trainers.one_site import advance, log_rounds, steps_of_the_run, topology_of_one_world
from .trainers.site_state import SiteState


class LocoCallback(Callback):
    """Attaches loco to the optimizers of `configure_optimizers`, which make one round.

    - What Lightning validates and saves is θ, not this site's weights between two rounds.
    - A checkpoint has the rounds of all ranks of the site, and `fit(ckpt_path=…)` continues bit for bit, if
      the data does: use a stateful loader. Every site needs a folder of its own.
    - The last step ends a round, so that all sites end with the same model.
    - The loggers of the Trainer get `handle.metrics()` after each round: docs/integrations.md lists them.

    All sites must take equally many steps: give them the same `max_steps`. Where sites come and go
    (LOCO_AT_LEAST) one that comes back takes the steps that the others have left.

    Args:
        topology: by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT, and is left when
            `fit` ends or fails: a site that still expects a round is told so at once, and must `fit` again.
        options: as for `loco.attach`: `sync_every`, `method` and so on.

    Attributes:
        handle: what `loco.attach` returned, once `fit` has begun; detached when that has ended.
    """

    def __init__(self, *, topology: loco.SiteTopology | None = None, **options: Any) -> None:
        self._topology = topology
        self._options = options
        self._saved: dict[str, Any] | None = None
        self._site: SiteState | None = None
        self._logged = 0
        self._fits = False
        self.handle: loco.Attached | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_scaler(trainer.precision)
        if trainer.strategy.restore_checkpoint_after_setup:
            raise ValueError(
                f"{type(trainer.strategy).__name__} loads weights and optimizer at once, in an order that "
                f"loco can't follow: use a strategy without sharding, or a plain loop"
            )
        self._leave()
        topology = topology_of_one_world(self._topology)
        optimizers = [_inner(optimizer) for optimizer in trainer.optimizers]
        several = optimizers if len(optimizers) > 1 else optimizers[0]
        self.handle = loco.attach(several, topology=topology, in_state_dict=False, **self._options)
        self._site = SiteState(self.handle)
        self._logged, self._fits = 0, True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            self._load(saved)
        steps = steps_of_the_run(self._attached)
        if steps > trainer.global_step:
            for schedule in trainer.lr_scheduler_configs:
                if schedule.interval == "step":
                    advance(schedule.scheduler, steps // schedule.frequency)

    def _load(self, saved: dict[str, Any]) -> None:
        if not saved:
            raise ValueError(
                "this checkpoint has no state of the rounds: it was saved without loco. Load its weights "
                "into the module, and fit without ckpt_path"
            )
        assert self._site is not None
        self._site.load_state_dict(saved)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        handle = self._attached
        if trainer.global_step == trainer.max_steps and not handle.is_synced:
            handle.sync()
        if trainer.global_step < trainer.max_steps <= steps_of_the_run(handle):
            trainer.should_stop = True
        self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fits:
            self._attached.eval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fits:
            self._attached.train()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._fits or self.handle is None or self._site is None:
            return
        checkpoint["loco"] = self._site.state_dict()
        if not self.handle.is_synced:
            # Written later than this, when the weights are this site's own again.
            self.handle.eval()
            shown = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: value.to("cpu", copy=True) for name, value in shown.items()}
            self.handle.train()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get("loco", {})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._attached.is_synced:  # stopped before `max_steps`
            self._attached.sync()
            self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Then Lightning calls no `teardown`."""
        self._leave()

    def _log(self, trainer: Trainer) -> None:
        report = self._attached.last_report
        if report is not None and report.round != self._logged:
            self._logged = report.round
            for logger in trainer.loggers:
                logger.log_metrics(self._attached.metrics(), step=trainer.global_step)

    def _leave(self) -> None:
        self._fits = False
        if self.handle is not None:
            self.handle.detach()
            if self._topology is None:
                self.handle.topology.close()

    @property
    def _attached(self) -> loco.Attached:
        if self.handle is None:
            raise RuntimeError("fit has not begun")
        return self.handle


def attach(
    fabric: Fabric,
    optimizer: _FabricOptimizer | Optimizer,
    *,
    topology: loco.SiteTopology | None = None,
    **options: Any,
) -> loco.Attached:
    """Attach loco to an optimizer that `fabric.setup` returned.

    The optimizer's own state dict is without the rounds. They are saved and loaded as one more entry:

        state = {"model": model, "optimizer": optimizer, "rounds": SiteState(handle)}
        fabric.save(path, state)
        fabric.load(path, state)

    Call `handle.sync()` when the loop ends, and `handle.eval()` and `handle.train()` around an evaluation,
    which then sees θ. Fabric's loggers get `handle.metrics()` after each round.

    Args:
        fabric: that has set up the optimizer.
        optimizer: what `fabric.setup` returned.
        topology: by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT.
        options: as for `loco.attach`: `sync_every`, `method` and so on.

    Raises:
        ValueError: torch's world is not one site; or precision is "16-mixed".
    """
    _refuse_scaler(fabric._precision.precision)
    topology = topology_of_one_world(topology)
    handle = loco.attach(_inner(optimizer), topology=topology, in_state_dict=False, **options)
    log_rounds(handle, fabric.log_dict)
    return handle


def _inner(optimizer: Any) -> Optimizer:
    """Lightning's wrappers imitate the class of what they wrap."""
    return getattr(optimizer, "optimizer", optimizer)


def _refuse_scaler(precision: Any) -> None:
    if precision == "16-mixed":
        raise ValueError(
            "precision '16-mixed' can't be used with loco: the steps that its gradient scaler skips would "
            "bring this site late to its rounds. Use 'bf16-mixed'"
        )
