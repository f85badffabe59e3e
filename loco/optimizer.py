"""PULSELoCo and DiLoCo around a torch optimizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from .config import Settings, checked_weight, inner_steps
from .exchange.wire_config import WireConfig
from .inner.init_step import only_initialises
from .inner.wrapper import Wrapper
from .members.sites import default_topology
from .members.view import SiteTopology
from .presets import outer_settings
from .round.loop import OuterLoop
from .surface import RoundSurface


class LowCommunicationOptimizer(RoundSurface, Wrapper):
    """What `PulseLoCo` and `DiLoCo` have in common: an inner optimizer for the steps of this site, and a
    round with the other sites after every `sync_every` of them.

    Attributes:
        inner: the wrapped optimizer; or if there are several, one that stands for them.
        topology: the sites, and this rank's position among them.
        local_step: inner steps since the last round.
        last_report: the `loco.SyncReport` of the latest round, or None before the first.
    """

    def __init__(
        self,
        inner: Optimizer | Iterable[Optimizer],
        settings: Settings,
        topology: SiteTopology | None,
        wire: WireConfig,
        *,
        weight: float,
        offload: bool,
    ) -> None:
        weight = checked_weight(weight)
        super().__init__(inner)
        self.topology = topology or default_topology()
        own = settings.of_site(self.topology.seat().get("name", self.topology.site))
        self._loop = OuterLoop(self.inner, own, self.topology, wire, offload=offload)
        self.weight = weight

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss.

        A step that a GradScaler skips because of an overflow counts too, so that all sites come to the round
        together. A step by which torch.distributed.checkpoint gives a fresh optimizer its state does not.

        Raises:
            LocoError: the round failed and changed nothing; the inner step is kept. `sync()` repeats the
                round, and so does the next `step()`, after another inner step. A rank on which something
                else failed (it ran out of memory, for example) raises that error, and the others a PeerError.
        """
        if only_initialises(self):
            return self.inner.step() if closure is None else self.inner.step(closure)
        self._loop.before_step()
        loss = None
        try:
            if not self._unscale_or_skip():
                loss = self.inner.step() if closure is None else self.inner.step(closure)
            self._loop.after_step()
        except BaseException:
            # GradScaler removes these only after a step that returns; left here, they would be used again.
            for left_by_scaler in ("grad_scale", "found_inf"):
                self.__dict__.pop(left_by_scaler, None)
            raise
        return loss

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

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "loco" all that the outer loop holds on this rank.

        Every rank saves its own: residuals and, between rounds, weights differ from site to site. As in
        torch, tensors are references. No messages are sent: if a round was interrupted before this rank knew
        whether it counts, this is the state before that round, and `["loco"]["undecided_round"]` is the
        round's number. Call `settle()` on every rank first to have it decided.

        Raises:
            LocoError: this rank's state is incomplete, because a round was interrupted while it was applied.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        inner: dict[str, Any] = self.inner.state_dict()
        state = {**inner, "loco": self._loop.own_state(inner)}
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], *, agree: Callable[[], object] | None = None
    ) -> None:
        """Resume from `state_dict()` of the same rank, bit for bit, in the middle of a round too.

        The weights are restored with it. Load the model first if you load both.

        Args:
            agree: called once the state is checked and the inner optimizer has accepted its part, when only
                copying is left. If it raises, nothing was changed: with it several ranks load together, or
                none of them does.

        Raises:
            ValueError: the state is not this rank's or not of this setup; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._loop.load(state_dict, agree)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} holds process groups and can't be copied or pickled: "
            f"save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._describe()} around {self.inner}"


class PulseLoCo(LowCommunicationOptimizer):
    """DiLoCo that sends only what the next forward pass can see (PULSELoCo, arXiv 2602.03839).

        model = MyModel()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
        optimizer = loco.PulseLoCo(inner, sync_every=8)     # starts from site 0's weights on all sites

        for batch in batches_of_this_site:                  # each site trains on its own data
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()                                # every 8th call also runs a round

        print(optimizer.last_report)                        # a loco.SyncReport

    Each site is a world of its own: what one launcher starts, of one process or several. Start each with

        LOCO_SITES=2 LOCO_SITE=berlin LOCO_AT=10.0.0.1:29510 python train.py

    or `torchrun`, or a framework's launcher, in the place of `python`: `help(loco.Sites)` says more. Inside
    its world a site trains as it always does, with DistributedDataParallel or FSDP2.

    Without these variables the sites share one world, and each rank is a site (`torchrun --nproc-per-node 4
    train.py`). DistributedDataParallel must then average gradients only inside a site. Where every rank is
    one, leave it out; where a site has several ranks, pass it the site's process group:

        topology = loco.Topology(ranks_per_site=8)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        optimizer = loco.PulseLoCo(inner, topology=topology)

    Each round leaves a `loco.SyncReport` in `last_report`: `round`, `numel`, `entries` and `density` (entries
    sent / all), `wire` and `exchange` (how they were coded and travelled), `payload_bytes`, `sent_bytes`,
    `received_bytes`, `site_bytes` and `dense_bytes` (what a dense all-reduce would send), `update_norms` and
    `left_out` by site, `outer_lr`, `residual_norm`, `seconds` by phase, of which it `waited` for the others,
    seconds `in_flight`, and `site` with the totals of this site. `help(loco.SyncReport)` explains each.

    After H inner steps, on each of R sites:

        Δ = c·(float(cast(θ)) − float(w))        what the inner steps did
        s = Δ + e                                plus what was withheld before
        send v_i = s_i where bf16(θ_i) ≠ bf16(θ_i − γ·s_i)
        e_i = s_i − v_i there (0, since v is exact), s_i elsewhere
        g = (Σ sent v, in site order) / Σ c      where no weight c is given, 1 and R
        m = μ·m + g
        θ = θ − α·(g + μ·m)                      Nesterov; plain: θ − α·m
        w = cast(θ)

    Two economies reduce what is sent, and keep the rest in e. Both are measured in ulp(θ), the BF16 ulp of θ:

        send only where also |s_i| > f·ulp(θ_i)
        v_i = the multiple of ulp(θ_i) / V nearest to s_i, ties to the even one; where it is 0, send nothing

    A third one reduces what comes back. Each site is the owner of a slice of the elements. Where the sum of
    what was sent is small, |Σ v_i| ≤ F·Σ c·ulp(θ_i), g_i is 0 and the owner keeps the sum in its e.

    Args:
        inner: the optimizer to wrap, built on the model's parameters; or several, `[muon, adamw]`, each with
            parameters of its own, which then step together. θ starts as site 0's weights.
        saving: how much of an update waits at its site until it has grown, in BF16 ulps: the more, the fewer
            bytes. 0.25 is a place to start, and the outer step finds its own length; 0 sends exact values.
            It decides `outer_lr`, `outer_momentum` and all from `gate_gain` to `sums_margin` that are not
            given. None: the published outer step.
        sync_every: H, inner steps per round; or where sites are not equally quick, that of each, by its name
            or number: `{"berlin": 8, "paris": 12}`, the same on all.
        outer_lr: α. None: with `saving` it finds its own length, from 1 on (docs/outer_step.md), and is 7 if
            that is 0; else 0.7.
        outer_momentum: μ, in [0, 1). None: 0 with `saving`, else 0.9.
        nesterov: whether the step looks ahead.
        topology: who the sites are; by default what LOCO_SITES, LOCO_SITE, LOCO_AT and LOCO_LIGHTHOUSE say,
            or, without them, each rank of the default process group.
        weight: c, by which this site counts in the mean. `optimizer.weight` can be set before each round, as
            to the tokens that it has learned from, over what a site usually learns from.
        gate: the format whose changes are sent: "bf16", "fp16", "fp8_e4m3" or "fp8_e5m2" (which saturate); or
            "open" to send every entry (DiLoCo's bits through PULSELoCo's wire).
        gate_gain: γ; above 1 sends earlier, and more. The paper uses 1. None: max(1, α / (1 − μ) / 2), with
            which PULSELoCo learns as DiLoCo does.
        gate_margin: f, a fraction of the BF16 ulp. None: 0, which sends every visible entry.
        value_steps: V, how many steps a BF16 ulp is divided into for the values that are sent: a power of two
            from 1 to 256. None: they are sent exactly.
        sums_margin: F, of the mean, a fraction or a multiple of the BF16 ulp; needs `value_steps`. None: 0.
        outlier_factor: leave a site out of a round, on all sites alike, if the norm of what it would send is
            more than this many times the median of the others'; its update stays in its residual, and
            `last_report.left_out` names it. None leaves no site out.
        overlap: True lets the inner steps go on while a round travels. It is applied one round late: see
            docs/overlap.md. A number is β, how far each site runs ahead by what it has sent; True: as far as
            the outer step would go, α, with Nesterov α·(1 + μ).
        wire: how entries are coded, which changes no bit of a round: "tight" (about 2.3 bytes each, coded on
            the CPU; always the fewest bytes, for metered links), "fast" (5 bytes), or "auto": the one that
            takes less time, whatever the bytes.
        exchange: "gather" (every site sends its entries to all), "owner" (each site sums a slice for all),
            "dense" (the same with every element, as FP32), or "auto": the one that is predicted to send the
            fewest bytes.
        offload: keep θ, e and m, 12 bytes per parameter, in pinned host memory instead of the GPU's. The
            round is then computed on the CPU, and exchanged by TCP from host memory.

    Raises:
        ValueError: an argument is out of range, a parameter can't be synchronised, or there is neither a
            process group nor a launcher.
        AgreementError: the sites were built differently.
    """

    def __init__(
        self,
        inner: Optimizer | Iterable[Optimizer],
        *,
        saving: float | None = None,
        sync_every: int | Mapping[Any, int] = 8,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        nesterov: bool = True,
        topology: SiteTopology | None = None,
        weight: float = 1.0,
        gate: str = "bf16",
        gate_gain: float | None = None,
        gate_margin: float | None = None,
        value_steps: int | None = None,
        sums_margin: float | None = None,
        outlier_factor: float | None = None,
        overlap: bool | float = False,
        wire: str = "auto",
        exchange: str = "auto",
        offload: bool = False,
    ) -> None:
        settings = Settings(
            kind="PulseLoCo",
            **inner_steps(sync_every),
            **outer_settings(
                saving,
                outer_lr=outer_lr,
                outer_momentum=outer_momentum,
                gate=gate,
                gate_gain=gate_gain,
                gate_margin=gate_margin,
                value_steps=value_steps,
                sums_margin=sums_margin,
            ),
            nesterov=nesterov,
            outlier_factor=outlier_factor,
            overlap=overlap,
        )
        codes = WireConfig.of_entries(wire, exchange, gate=gate)
        super().__init__(inner, settings, topology, codes, weight=weight, offload=offload)


class DiLoCo(LowCommunicationOptimizer):
    """Exchange FP32 pseudo-gradients after every H inner steps (DiLoCo, arXiv 2311.08105).

        Δ = c·(float(cast(θ)) − float(w))
        g = (Σ Δ, in site order) / Σ c           where no weight c is given, 1 and R
        m = μ·m + g
        θ = θ − α·(g + μ·m)                      Nesterov; plain: θ − α·m
        w = cast(θ)

    Each site sums one slice and the slices are gathered: a round sends as much as a ring all-reduce,
    2(R−1)/R · 4 bytes per parameter, and all sites get the same bits. It is used as `loco.PulseLoCo` is: see
    the example in `help(loco.PulseLoCo)`.

    Args:
        inner: the optimizer to wrap, built on the model's parameters; or several, `[muon, adamw]`, each with
            parameters of its own, which then step together. θ starts as site 0's weights.
        sync_every: H, inner steps per round; or where sites are not equally quick, that of each, by its name
            or number: `{"berlin": 8, "paris": 12}`, the same on all.
        outer_lr: α.
        outer_momentum: μ, in [0, 1).
        nesterov: whether the step looks ahead.
        topology: who the sites are; by default what LOCO_SITES, LOCO_SITE, LOCO_AT and LOCO_LIGHTHOUSE say,
            or, without them, each rank of the default process group.
        weight: as `PulseLoCo`.
        overlap: as `PulseLoCo`.
        wire: "float32"; or "bfloat16" or "int8" (with one scale for every 256 values), which round both what
            is sent and the sums.
        offload: keep θ and m in host memory, as `PulseLoCo`.

    Raises:
        ValueError, AgreementError: as `PulseLoCo`.
    """

    def __init__(
        self,
        inner: Optimizer | Iterable[Optimizer],
        *,
        sync_every: int | Mapping[Any, int] = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        topology: SiteTopology | None = None,
        weight: float = 1.0,
        overlap: bool | float = False,
        wire: str = "float32",
        offload: bool = False,
    ) -> None:
        settings = Settings(
            kind="DiLoCo",
            **inner_steps(sync_every),
            **outer_settings(
                None, outer_lr=outer_lr, outer_momentum=outer_momentum, gate="open", gate_gain=1.0
            ),
            nesterov=nesterov,
            overlap=overlap,
        )
        super().__init__(inner, settings, topology, WireConfig.of_all(wire), weight=weight, offload=offload)
