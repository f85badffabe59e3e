"""PULSELoCo and DiLoCo around a torch optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .config import Settings, matching_gain
from .exchange.conversation import WireConfig
from .members.fixed import Topology
from .report import SyncReport
from .round import outer_loop
from .round.hooks import Hook
from .round.loop import OuterLoop
from .round.state import check, state_of, take_over
from .wrapper import Wrapper


class LowCommunicationOptimizer(Wrapper):
    """What `PulseLoCo` and `DiLoCo` have in common: an inner optimizer for the steps of this site, and a
    round with the other sites after every `sync_every` of them.

    Attributes:
        inner: the wrapped optimizer.
        topology: the sites, and this rank's position among them.
        local_step: inner steps since the last round.
        last_report: the `loco.SyncReport` of the latest round, or None before the first.
    """

    def __init__(
        self,
        inner: Optimizer,
        settings: Settings,
        topology: Topology | None,
        wire: WireConfig,
        offload: bool,
    ) -> None:
        super().__init__(inner)
        self.topology = topology or Topology()
        self._outer = outer_loop(inner, settings, self.topology, wire, offload=offload)
        self.local_step = 0
        self.last_report: SyncReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss.

        A step that a GradScaler skips because of an overflow counts too, so that all sites come to the round
        together.

        Raises:
            LocoError: the round failed and changed nothing; the inner step is kept. `sync()` repeats the
                round, and so does the next `step()`, after another inner step. A rank on which something
                else failed (it ran out of memory, for example) raises that error, and the others a PeerError.
        """
        self._settle()
        loss = None
        try:
            if not self._unscale_or_skip():
                loss = self.inner.step() if closure is None else self.inner.step(closure)
            self.local_step += 1
            self._outer.tell_step(self.local_step)
            if self.local_step >= self.sync_every:
                self.sync()
        except BaseException:
            # GradScaler removes these only after a step that returns; left here, they would be used again.
            for left_by_scaler in ("grad_scale", "found_inf"):
                self.__dict__.pop(left_by_scaler, None)
            raise
        return loss

    def sync(self) -> SyncReport:
        """Run a round now; call it on every rank. Useful at the end of training or before an evaluation.

        Raises:
            LocoError: the round failed and changed nothing; it can be repeated.
        """
        return self._done(self._outer.run_round())

    def _settle(self) -> None:
        """Finish a round whose end was cut off."""
        report = self._outer.settle()
        if report is not None:
            self._done(report)

    def _done(self, report: SyncReport) -> SyncReport:
        self.last_report, self.local_step = report, 0
        return report

    # With this, torch's GradScaler always calls step(), with `grad_scale` and `found_inf` set on this
    # optimizer. If it skipped the steps whose gradients overflow, this site would come late to its rounds.
    _step_supports_amp_scaling = True

    def _unscale_or_skip(self) -> bool:
        """Unscale the gradients, as GradScaler does for other optimizers. -> whether they overflowed"""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf):
            return True
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(inverse.to(p.grad.device))
        return False

    @property
    def outer_state(self) -> OuterLoop:
        """The outer state of this rank, to be read: θ (`anchor`), m (`momentum`) and e (`residual`) of the
        elements `start` to `stop` of the flat parameters; `parameters`, the position of each parameter among
        these; `gate`; `rounds_done`.
        """
        return self._outer

    def register_round_hook(self, hook: Hook) -> RemovableHandle:
        """Have `hook(progress)` called at every phase of every round on this rank: see `loco.RoundProgress`.

        An error that it raises counts as this rank's own failure in that phase.
        """
        return self._outer.hooks.register(hook)

    @property
    def sync_every(self) -> int:
        return self._outer.settings.sync_every

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self._outer.rounds_done

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "loco" all that the outer loop holds on this rank.

        Every rank saves its own: residuals and, between rounds, weights differ from site to site. As in
        torch, tensors are references.
        """
        self._settle()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state: dict[str, Any] = self.inner.state_dict()
        own = {"local_step": self.local_step, "inner_entries": len(state["state"])}
        state = {**state, "loco": state_of(self._outer) | own}
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()` of the same rank, bit for bit, in the middle of a round too.

        The weights are restored with it. Load the model first if you load both.

        Raises:
            ValueError: the state is not this rank's or not of this setup; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        if "loco" not in state_dict:
            raise ValueError(
                "this state has no 'loco' entry, so it is not of a loco optimizer: load an inner "
                "optimizer's state into the inner optimizer before you wrap it"
            )
        outer = state_dict.pop("loco")
        check(self._outer, outer)
        found = len(state_dict["state"])
        saved = outer.get("inner_entries", found)
        if found != saved:
            raise ValueError(
                f"this state holds the inner optimizer's state of {found} parameters, {saved} were saved. "
                f"torch.distributed.checkpoint fills only what is there, and in a fresh optimizer nothing "
                f"is: load with loco.Checkpoints"
            )
        before = self.inner.state_dict()
        try:
            self.inner.load_state_dict(state_dict)
        except BaseException:
            self.inner.load_state_dict(before)
            raise
        take_over(self._outer, outer)
        self.local_step = 0 if self._outer.adopt_state(outer) else int(outer["local_step"])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} holds process groups and can't be copied or pickled: "
            f"save its state_dict()"
        )

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in vars(self._outer.settings).items() if name != "kind"
        )
        return f"{type(self).__name__}({settings}, sites={self.topology.num_sites}) around {self.inner}"


class PulseLoCo(LowCommunicationOptimizer):
    """DiLoCo that sends only what the next forward pass can see (PULSELoCo, arXiv 2602.03839).

        model = MyModel()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
        optimizer = loco.PulseLoCo(inner, sync_every=8)     # starts from site 0's weights on all sites

        for batch in batches_of_this_site:                  # each site trains on its own data
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()                                # every 8th call also runs a round

        if torch.distributed.get_rank() == 0:
            print(optimizer.last_report)                    # a loco.SyncReport

    Launch it with `torchrun --nproc-per-node 4 train.py`: each rank is a site.

    DistributedDataParallel averages gradients at every step, and must do so only inside a site. Where every
    rank is a site, leave it out. Where a site has several ranks, pass it the site's process group; by default
    it would take the whole world:

        topology = loco.Topology(ranks_per_site=8)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        optimizer = loco.PulseLoCo(inner, topology=topology)

    Each round leaves a `loco.SyncReport` in `last_report`: `round`, `numel`, `entries` and `density` (entries
    sent / all), `wire` and `exchange` (how they were coded and travelled), `payload_bytes`, `sent_bytes`,
    `received_bytes`, `site_bytes` and `dense_bytes` (what a dense all-reduce would send), `update_norms` and
    `left_out` by site, `residual_norm`, and `seconds` by phase. `help(loco.SyncReport)` explains each.

    After H inner steps, on each of R sites:

        Δ = float(cast(θ)) − float(w)            what the inner steps did
        s = Δ + e                                plus what was withheld before
        send v_i = s_i where bf16(θ_i) ≠ bf16(θ_i − γ·s_i)
        e_i = s_i − v_i there (0, since v is exact), s_i elsewhere
        g = (Σ sent v, in site order) / R
        m = μ·m + g
        θ = θ − α·(g + μ·m)                      Nesterov; plain: θ − α·m
        w = cast(θ)

    Two economies reduce what is sent, and keep the rest in e. Both are measured in ulp(θ), the BF16 ulp of θ:

        send only where also |s_i| > f·ulp(θ_i)
        v_i = the multiple of ulp(θ_i) / V nearest to s_i, ties to the even one; where it is 0, send nothing

    Args:
        inner: the optimizer to wrap, built on the model's parameters. θ starts as site 0's weights.
        sync_every: H, inner steps per round.
        outer_lr: α.
        outer_momentum: μ, in [0, 1).
        nesterov: whether the step looks ahead.
        topology: which ranks form a site; by default each rank of the default process group is a site.
        gate: the format whose changes are sent: "bf16", "fp16", "fp8_e4m3" or "fp8_e5m2" (which saturate); or
            "open" to send every entry (DiLoCo's bits through PULSELoCo's wire).
        gate_gain: γ; above 1 sends earlier, and more. The paper uses 1. With the default,
            max(1, α / (1 − μ) / 2), PULSELoCo learns as DiLoCo does.
        gate_margin: f, a fraction of the BF16 ulp; 0 sends every visible entry.
        value_steps: V, how many steps a BF16 ulp is divided into for the values that are sent: a power of two
            from 2 to 256; None sends them exactly.
        outlier_factor: leave a site out of a round, on all sites alike, if the norm of what it would send is
            more than this many times the median of the others'; its update stays in its residual, and
            `last_report.left_out` names it. None leaves no site out.
        wire: how entries are coded, which changes no bit of a round: "tight" (about 2.3 bytes each, coded on
            the CPU), "fast" (5 bytes), or "auto": the one that is predicted to take less time.
        exchange: "gather" (every site sends its entries to all), "owner" (each site sums a slice for all),
            "dense" (the same with every element, as FP32), or "auto": the one that is predicted to send the
            fewest bytes.
        offload: keep θ, e and m, 12 bytes per parameter, in pinned host memory instead of the GPU's. The
            round is then computed on the CPU, and exchanged by gloo from host memory.

    Raises:
        ValueError: an argument is out of range, a parameter can't be synchronised, or there is neither a
            process group nor a launcher.
        AgreementError: the sites were built differently.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        sync_every: int = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        topology: Topology | None = None,
        gate: str = "bf16",
        gate_gain: float | None = None,
        gate_margin: float = 0.0,
        value_steps: int | None = None,
        outlier_factor: float | None = None,
        wire: str = "auto",
        exchange: str = "auto",
        offload: bool = False,
    ) -> None:
        settings = Settings(
            kind="PulseLoCo",
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            gate=gate,
            gate_gain=matching_gain(outer_lr, outer_momentum) if gate_gain is None else gate_gain,
            gate_margin=gate_margin,
            value_steps=value_steps,
            outlier_factor=outlier_factor,
        )
        super().__init__(inner, settings, topology, WireConfig.of_entries(wire, exchange, gate=gate), offload)


class DiLoCo(LowCommunicationOptimizer):
    """Exchange FP32 pseudo-gradients after every H inner steps (DiLoCo, arXiv 2311.08105).

        Δ = float(cast(θ)) − float(w)
        g = (Σ Δ, in site order) / R
        m = μ·m + g
        θ = θ − α·(g + μ·m)                      Nesterov; plain: θ − α·m
        w = cast(θ)

    Each site sums one slice and the slices are gathered: a round sends as much as a ring all-reduce,
    2(R−1)/R · 4 bytes per parameter, and all sites get the same bits. It is used as `loco.PulseLoCo` is: see
    the example in `help(loco.PulseLoCo)`.

    Args:
        inner: the optimizer to wrap, built on the model's parameters. θ starts as site 0's weights.
        sync_every: H, inner steps per round.
        outer_lr: α.
        outer_momentum: μ, in [0, 1).
        nesterov: whether the step looks ahead.
        topology: which ranks form a site; by default each rank of the default process group is a site.
        wire: "float32"; or "bfloat16" or "int8" (with one scale for every 256 values), which round both what
            is sent and the sums.
        offload: keep θ and m in host memory, as `PulseLoCo`.

    Raises:
        ValueError, AgreementError: as `PulseLoCo`.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        sync_every: int = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        topology: Topology | None = None,
        wire: str = "float32",
        offload: bool = False,
    ) -> None:
        settings = Settings(
            kind="DiLoCo",
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            gate="open",
            gate_gain=1.0,
            gate_margin=0.0,
            value_steps=None,
        )
        super().__init__(inner, settings, topology, WireConfig.of_all(wire), offload)
