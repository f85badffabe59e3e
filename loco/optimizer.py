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
    """An inner optimizer that steps on its own, and an outer loop that joins the sites every so often."""

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
        self.local_step = 0  # inner steps since the last round
        self.last_report: SyncReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss.

        A step that a GradScaler skips for an overflow counts too: the sites stay in step.

        Raises:
            LocoError: the round failed and changed nothing; the inner step stands. `sync()` repeats the
                round, and so does the next `step()`, after another inner step. A rank that failed for a
                reason of its own (no memory, say) raises that error, and the others a PeerError.
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
            # GradScaler takes these back only from a step that returns, and would use them again.
            for left_by_scaler in ("grad_scale", "found_inf"):
                self.__dict__.pop(left_by_scaler, None)
            raise
        return loss

    def sync(self) -> SyncReport:
        """Run a round now, on every rank: at the end of training, before an evaluation.

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

    # torch's GradScaler then always calls step(), with `grad_scale` and `found_inf` set on this optimizer. If
    # it left out the calls whose gradients overflow, one site's rounds would come later than the others'.
    _step_supports_amp_scaling = True

    def _unscale_or_skip(self) -> bool:
        """What GradScaler does for other optimizers: unscale the gradients; true if they overflowed."""
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
        """θ (`anchor`), m (`momentum`) and e (`residual`) of this rank's part of the parameters, which is
        `start` to `stop`; `parameters`, which says where each parameter lies; the `gate`; `rounds_done`.
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
        """Rounds done."""
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

    After H inner steps, on each of R sites:

        Δ = float(cast(θ)) − float(w)            what the inner steps did
        s = Δ + e                                plus what was withheld before
        send v_i = s_i where bf16(θ_i) ≠ bf16(θ_i − γ·s_i)
        e_i = s_i − v_i there (0, since v is exact), s_i elsewhere
        g = (Σ sent v, in site order) / R
        m = μ·m + g
        θ = θ − α·(g + μ·m)                      Nesterov; plain: θ − α·m
        w = cast(θ)

    Two economies send less, and keep in e what they do not send. Both count in ulp(θ), the BF16 ulp of θ:

        send only where also |s_i| > f·ulp(θ_i)
        v_i = the multiple of ulp(θ_i) / V nearest to s_i, ties to the even one; where it is 0, send nothing

    Args:
        inner: the optimizer to wrap, built on the model's parameters. θ starts as site 0's weights.
        sync_every: H, inner steps per round.
        outer_lr: α.
        outer_momentum: μ, in [0, 1).
        nesterov: whether the step looks ahead.
        topology: which ranks form a site; by default each rank of the default group is one.
        gate: the format whose changes are sent: "bf16", "fp16", "fp8_e4m3" or "fp8_e5m2" (which saturate); or
            "open" to send every entry (DiLoCo's bits through PULSELoCo's wire).
        gate_gain: γ; above 1 sends earlier, and more. The paper's is 1. The default, max(1, α / (1 − μ) / 2),
            lets PULSELoCo learn as DiLoCo does.
        gate_margin: f, a fraction of the BF16 ulp; 0 sends all that is visible.
        value_steps: V, steps in which values are sent, to the BF16 ulp: a power of two from 2 to 256; None
            sends them exactly.
        outlier_factor: leave a site out of a round, on all sites alike, if what it would send has a norm of
            more than so many times the median of the others'; its update stays in its residual, and
            `last_report.left_out` names it. None leaves nobody out.
        wire: how entries are coded, which changes no bit of a round: "tight" (about 2.3 bytes each, by the
            host's cores), "fast" (5 bytes), or "auto": what is predicted to take less time.
        exchange: "gather" (every site's entries to all), "owner" (each site sums a slice for all), "dense"
            (the same with every element, as FP32), or "auto": what is predicted to send the fewest bytes.
        offload: keep θ, e and m, 12 bytes per parameter, in pinned host memory instead of the GPU's. The
            host's cores then do the round's work, and its memory and gloo the exchange.

    Raises:
        ValueError: an argument is out of range, a parameter can't be synchronised, or there is no
            process group.
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

    Each site sums one slice and the slices are gathered, so a round sends what a ring all-reduce would,
    2(R−1)/R · 4 bytes per parameter, and all sites get the same bits.

    Args:
        inner: the optimizer to wrap, built on the model's parameters. θ starts as site 0's weights.
        sync_every: H, inner steps per round.
        outer_lr: α.
        outer_momentum: μ, in [0, 1).
        nesterov: whether the step looks ahead.
        topology: which ranks form a site; by default each rank of the default group is one.
        wire: "float32"; or "bfloat16" or "int8" (with a scale for every 256), which round what is sent and
            the sums.
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
