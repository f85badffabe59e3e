"""Rounds in the Trainer of transformers, and in those that are built on it (TRL's).

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[LocoCallback(sync_every=8)])
    trainer.train()

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import loco

from . import rank_file
from .one_site import topology_of_one_world


class LocoCallback(TrainerCallback):
    """Attaches loco to the Trainer's optimizer, once the Trainer has prepared it.

    - What the Trainer evaluates and saves is θ, not this site's weights between two rounds.
    - Every rank saves the state of its rounds beside the Trainer's checkpoint, and `resume_from_checkpoint`
      continues bit for bit. Every site needs an `output_dir` of its own. The checkpoint is looked for in
      `output_dir`; if it is elsewhere, set `args.resume_from_checkpoint` to it, too.
    - The last step ends a round, so that all sites end with the same model. With `load_best_model_at_end`
      they end with the best that they have evaluated, which is the same if they evaluate on the same data.
    - Logs have `loco/round`, `loco/density` and `loco/residual_norm` of the latest round, and
      `loco/sent_bytes` and `loco/received_bytes` of all rounds of this training.

    All sites must take equally many steps: give them the same `max_steps`.

    A training that has failed can be begun again in the same process, by `train()` or by
    `auto_find_batch_size`, which calls the callback anew: it then leaves the sites and joins them again. The
    other sites, whose next round fails, must begin again, too.

    Args:
        topology: by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT, and is left when
            the training ends: a site that still expects a round is told so at once.
        options: as for `loco.attach`: `sync_every`, `method` and so on.

    Attributes:
        handle: what `loco.attach` returned, once training has begun.
    """

    def __init__(self, *, topology: loco.SiteTopology | None = None, **options: Any) -> None:
        self._topology = topology
        self._options = options
        self._sent = self._received = self._counted = self._logged = 0
        self.handle: loco.Attached | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _refuse(args, state)
        self._leave()  # a training that has failed: no hook says so when it does
        topology = topology_of_one_world(self._topology)
        optimizer = kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        loaded = rank_file.fingerprint(optimizer)
        self.handle = handle = loco.attach(optimizer, topology=topology, in_state_dict=False, **self._options)
        if state.global_step:
            rank_file.load(handle, _checkpoint(args, state), loaded)
        self._sent = self._received = 0
        self._counted = self._logged = handle.round
        if args.eval_on_start:
            handle.eval()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._attached.train()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        handle = self._attached
        self._count()
        if control.should_training_stop and handle.local_step:
            handle.sync()
            self._count()
        if control.should_evaluate or control.should_save:
            handle.eval()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_evaluate or control.should_save:
            self._attached.eval()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        handle = self._attached
        saved = rank_file.fingerprint(handle.inner)
        handle.train()
        if not args.save_only_model:
            rank_file.save(handle, _folder(args, state), saved)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        report = None if self.handle is None else self.handle.last_report
        if report is None or logs is None or report.round == self._logged:
            return
        self._logged = report.round
        own = {
            "loco/round": report.round,
            "loco/density": report.density,
            "loco/residual_norm": report.residual_norm,
            "loco/sent_bytes": self._sent,
            "loco/received_bytes": self._received,
        }
        logs.update(own)
        state.log_history[-1].update(own)  # where the Trainer has copied them to

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        handle = self._attached
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if not best:  # else the weights are the best ones by now
            handle.train()
            if handle.local_step:  # a callback stopped the training
                handle.sync()
        self._leave()

    def _leave(self) -> None:
        if self.handle is not None:
            self.handle.detach()
            if self._topology is None:
                self.handle.topology.close()

    @property
    def _attached(self) -> loco.Attached:
        if self.handle is None:
            raise RuntimeError("training has not begun")
        return self.handle

    def _count(self) -> None:
        """Add the bytes of a round that has just been run."""
        report = self._attached.last_report
        if report is not None and report.round != self._counted:
            self._counted = report.round
            self._sent += report.sent_bytes
            self._received += report.received_bytes


def _refuse(args: TrainingArguments, state: TrainerState) -> None:
    if args.fp16:
        raise ValueError(
            "fp16=True can't be used with loco: the steps that its gradient scaler skips would bring this "
            "site late to its rounds. Use bf16=True"
        )
    if state.is_hyper_param_search:
        raise ValueError("a hyperparameter search can't be used with loco: every trial would need all sites")


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer resumed from, as far as it tells a callback."""
    told = args.resume_from_checkpoint
    if isinstance(told, str) and Path(told).is_dir():
        return Path(told)
    return _folder(args, state)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
