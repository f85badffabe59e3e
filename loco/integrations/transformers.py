"""Rounds in the Trainer of transformers, and in those that are built on it (TRL's).

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[LocoCallback(sync_every=8)])
    trainer.train()

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import loco
from loco.sync import Publisher, lora_adapter
from loco.sync.weights.adapter import is_peft

from .trainers import rank_file
from .trainers.one_site import advance, steps_of_the_run, topology_of_one_world
from .trainers.reporters import log_before_reporters
from .trainers.resuming import find_checkpoints_by, newest_of_all


class LocoCallback(TrainerCallback):
    """Attaches loco to the Trainer's optimizer, once the Trainer has prepared it.

    - What the Trainer evaluates and saves is θ, not this site's weights between two rounds.
    - Every rank saves the state of its rounds beside the Trainer's checkpoint, and `resume_from_checkpoint`
      continues bit for bit; if it is True, from the newest checkpoint that all sites have. Every site needs
      an `output_dir` of its own. If the checkpoint is elsewhere, set `args.resume_from_checkpoint` to it,
      too.
    - The last step ends a round, so that all sites end with the same model. With `load_best_model_at_end`
      they end with the best that they have evaluated, which is the same if they evaluate on the same data.
    - Logs have `handle.metrics()` of the latest round, and all of `report_to` get them under these names:
      docs/integrations.md lists them.
    - With `publish` all sites together publish the model after each round, for inference workers; of a PEFT
      model the adapter.

    All sites must take equally many steps: give them the same `max_steps`. Where sites come and go
    (LOCO_AT_LEAST) one that comes back goes on at the step at which the others are.

    A training that has failed can be begun again in the same process, by `train()` or by
    `auto_find_batch_size`, which calls the callback anew: it then leaves the sites and joins them again. The
    other sites, whose next round fails, must begin again, too.

    Args:
        publish: where versions of the weights go, the `url` of a `loco.sync.Publisher`. All ranks of all
            sites write there.
        topology: by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT, and is left when
            the training ends: a site that still expects a round is told so at once.
        options: as for `loco.attach`: `saving`, `sync_every`, `method` and so on.

    Attributes:
        handle: what `loco.attach` returned, once training has begun; detached when that has ended.
        publisher: with `publish` and while training lasts, the `loco.sync.Publisher`.
    """

    def __init__(
        self,
        *,
        publish: str | None = None,
        topology: loco.SiteTopology | None = None,
        **options: Any,
    ) -> None:
        self._publish = publish
        self._topology = topology
        self._joined: loco.SiteTopology | None = None  # before training begins
        self._options = options
        self._logged = 0
        self.handle: loco.Attached | None = None
        self.publisher: Publisher | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        find_checkpoints_by(self._newest_of_all, str(args.output_dir))

    def _newest_of_all(self, folder: str) -> str | None:
        self._leave()
        self._joined = topology_of_one_world(self._topology)
        return newest_of_all(self._joined, folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _refuse(args, state)
        self._leave()  # a training that has failed: no hook says so when it does
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        topology, self._joined = self._joined or topology_of_one_world(self._topology), None
        loaded = rank_file.fingerprint(optimizer)
        _name_parameters(optimizer, model)
        self.handle = handle = loco.attach(optimizer, topology=topology, in_state_dict=False, **self._options)
        if state.global_step:
            rank_file.load(handle, _checkpoint(args, state), loaded)
        self._logged = handle.round
        self._catch_up(state, kwargs["lr_scheduler"])
        log_before_reporters(self)
        if self._publish is not None:
            source = lora_adapter(model, model.active_adapter) if is_peft(model) else model
            self.publisher = Publisher(source, self._publish, stream=topology)
            self.publisher.after(handle)
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
        self._catch_up(state, kwargs["lr_scheduler"])
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        if control.should_training_stop and not handle.is_synced:
            handle.sync()
        if control.should_evaluate or control.should_save:
            handle.eval()

    def _catch_up(self, state: TrainerState, scheduler: Any) -> None:
        """Count as the other sites do, after this one has been away."""
        steps = steps_of_the_run(self._attached)
        if steps > state.global_step:
            state.global_step = steps
            advance(getattr(scheduler, "scheduler", scheduler), steps)  # Accelerate wraps it

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
        metrics = self._attached.metrics()
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # where the Trainer has copied the logs to

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        handle = self._attached
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if not best:  # else the weights are the best ones by now
            handle.train()
            if not handle.is_synced:  # a callback stopped the training, or rounds overlap
                handle.sync()
        self._leave()

    def _leave(self) -> None:
        if self.handle is not None:
            self.handle.detach()
            if self._topology is None:
                self.handle.topology.close()
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()

    @property
    def _attached(self) -> loco.Attached:
        if self.handle is None:
            raise RuntimeError("training has not begun")
        return self.handle


def _refuse(args: TrainingArguments, state: TrainerState) -> None:
    if args.fp16:
        raise ValueError(
            "fp16=True can't be used with loco: the steps that its gradient scaler skips would bring this "
            "site late to its rounds. Use bf16=True"
        )
    if state.is_hyper_param_search:
        raise ValueError("a hyperparameter search can't be used with loco: every trial would need all sites")


def _name_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """As `AdamW(model.named_parameters())` does: so errors say "model.layers.3…" and not "group0.param0"."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if all(id(p) in names for p in group["params"]):
            group["param_names"] = [names[id(p)] for p in group["params"]]


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer resumed from, as far as it tells a callback."""
    told = args.resume_from_checkpoint
    if isinstance(told, str) and Path(told).is_dir():
        return Path(told)
    return _folder(args, state)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
