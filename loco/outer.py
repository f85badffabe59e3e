"""The outer loop: the state that the sites share, and a round as its numbered steps (DESIGN's §2)."""

import hashlib
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels
from loco.kernels import Encoded, Gate, Known, OuterStep

from .agreement import agree_on_setup
from .choice import Habits
from .errors import AgreementError, LocoError, ReplicaError
from .exchange import Exchange, Wire
from .layout import Layout
from .problem import Problem, Refused
from .report import SyncReport
from .settings import GATES, Settings
from .topology import Topology
from .wire import VERSION, Status

GATHER_ELEMENTS = 1 << 20  # of the anchor at a time inside a site: 4 MiB from each of its ranks


class OuterLoop:
    """Anchor θ, outer momentum m and residual e of this rank's slice, and the rounds over them.

    Args:
        inner: the optimizer whose parameters are synchronised.
        settings: equal on all sites.
        topology: who the sites are.
        wire: how entries travel.
        offload: keep θ, m and e in host memory.

    Raises:
        ValueError: this rank's parameters can't be synchronised.
        AgreementError: another rank's can't, or the sites differ.
        TransportError, ReplicaError: site 0's weights did not reach all.
    """

    def __init__(
        self,
        inner: Optimizer,
        settings: Settings,
        topology: Topology,
        wire: Wire,
        *,
        offload: bool,
    ) -> None:
        self.settings = settings
        self.topology = topology
        self.rounds = 0  # rounds done
        self._everyone = topology.everyone()
        self.layout = self._agree(inner, wire)
        self._device = torch.device("cpu") if offload else self.layout.device  # of θ, m and e
        self._inner = inner
        self._wire = wire
        self._habits = Habits(wire.codec, topology.num_sites)
        # A name that all ranks share and no other optimizer has, to meet under after a failure.
        self._name = self._everyone.swap_records(uuid.uuid4().bytes, phase="naming")[0].hex()
        self._connect()
        self._torn = False

        seen = GATES[settings.gate]
        self._gate = None
        if seen is not None:
            self._gate = Gate(
                dtype=seen,
                gain=settings.gate_gain,
                margin=settings.gate_margin,
                value_steps=settings.value_steps,
            )
        self._step = OuterStep(
            num_sites=topology.num_sites,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.nesterov,
        )
        # The ranks of a site share the flat state in equal slices, the last ones possibly shorter.
        numel = self.layout.numel
        self._width = -(-numel // topology.ranks_per_site)
        self.start = min(topology.place * self._width, numel)
        self.stop = min(self.start + self._width, numel)
        self.anchor = self._zeros()
        self.momentum = self._zeros() if settings.outer_momentum else None
        self.residual = self._zeros() if self._gate is not None else None
        self._start_alike()

    @torch.no_grad()
    def round(self) -> SyncReport:
        """Steps 2 to 8 (step 1 is the caller's H inner steps).

        Until every site has confirmed that it received everything, nothing is written: a round that fails
        leaves θ, m, e and w as they were, and can be repeated by all ranks together.
        """
        self.check_whole()
        if not self._connected:
            self._connect(meet_as=self._name)
        before = self._bytes()
        encoding = time.perf_counter()
        with ExitStack() as written_back:
            # 2. Δ = float(cast(θ)) − float(w)   3. s = Δ + e   4. visible?   5. what to send
            weights, encoded, problem = self._encode(written_back)
            exchanging = time.perf_counter()
            with self._conversation():
                drift = self._site_drift(weights is not None)
                outcome = self._exchange.run(
                    encoded,
                    Known(self.anchor, self.momentum, self._gate or Gate()),
                    round=self.rounds + 1,
                    problem=problem or drift,
                )
            assert encoded is not None
            assert weights is not None

            # 5. e = what was not sent   6. g = Σ / R   7. m and θ   8. w = cast(θ)
            applying = time.perf_counter()
            self._torn = True
            residual_norm = kernels.apply(
                self.anchor,
                self.momentum,
                weights,
                self.residual,
                encoded.entries,
                outcome.contributions,
                self._step,
            )
        with self._conversation():
            self._share_anchor_in_site()
        self.rounds += 1
        self._torn = False
        done = time.perf_counter()

        numel, entries = self.stop - self.start, encoded.entries.values.numel()
        sent, received, inside = (now - then for now, then in zip(self._bytes(), before, strict=True))
        sites = self.topology.num_sites
        return SyncReport(
            round=self.rounds,
            numel=numel,
            entries=entries,
            density=entries / numel if numel else 0.0,
            wire=outcome.codec,
            exchange=outcome.exchange,
            payload_bytes=outcome.payload_bytes,
            sent_bytes=sent,
            received_bytes=received,
            site_bytes=inside,
            dense_bytes=2 * (sites - 1) * 4 * numel // sites,
            residual_norm=residual_norm,
            seconds={
                "encode": exchanging - encoding,
                "exchange": applying - exchanging,
                "apply": done - applying,
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything of this rank, by reference: plain numbers, strings and tensors.

        The working weights are part of it: between rounds each site has its own, and a model file that
        one rank wrote for all would lose the others'.
        """
        self.check_whole()
        return {
            "format": 1,
            **self._identity(),
            "settings": vars(self.settings).copy(),
            "round": self.rounds,
            "anchor": self.anchor,
            "momentum": self.momentum,
            "residual": self.residual,
            "weights": [p.detach() for p in self.layout.params],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not this rank's, before anything is changed."""
        if state.get("format") != 1:
            raise ValueError(f"a loco state of format {state.get('format')!r}; this is format 1")
        for key, mine in (self._identity() | {"settings": vars(self.settings)}).items():
            _check_same(key, state.get(key), mine)
        for name in ("round", "local_step"):
            count = state.get(name)
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"this state's {name} is {count!r}, not a number of rounds or steps")
        if len(state.get("weights") or []) != len(self.layout.params):
            raise ValueError("this state does not hold the weights of all parameters: it is damaged")
        for name, mine, saved in self._tensors(state):
            if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
                what = f"{saved.dtype} {tuple(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)
                raise ValueError(
                    f"this state's {name} is {what}, not {mine.dtype} {tuple(mine.shape)}: it is damaged"
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check_state` has passed, weights included."""
        self._torn = True
        for _, mine, saved in self._tensors(state):
            mine.copy_(saved)
        self.rounds = int(state["round"])
        self._torn = False

    def _tensors(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Any]]:
        """What this rank holds beside what a state has for it."""
        for name in ("anchor", "momentum", "residual"):
            mine = getattr(self, name)
            if mine is not None:
                yield name, mine, state.get(name)
        for name, param, saved in zip(self.layout.names, self.layout.params, state["weights"], strict=True):
            yield f"weight {name}", param, saved

    def check_whole(self) -> None:
        """Refuse to go on, or to save, after a round was stopped while it was being applied: by Ctrl-C,
        for want of memory, or by a link inside the site.

        Raises:
            LocoError: the state is half of one round and half of the next.
        """
        if self._torn:
            raise LocoError(
                f"round {self.rounds + 1} was stopped while it was being applied: this rank's state is "
                f"neither before nor after it. Load the last checkpoint"
            )

    def _zeros(self) -> Tensor:
        """A part of the outer state. In host memory it is pinned, if there is a GPU to copy from."""
        pinned = self._device.type == "cpu" and self.layout.device.type == "cuda"
        numel = self.stop - self.start
        return torch.zeros(numel, dtype=torch.float32, device=self._device, pin_memory=pinned)

    def _connect(self, *, meet_as: str | None = None) -> None:
        self._across, self._inside = self.topology.connect(self._device, meet_as=meet_as)
        self._exchange = Exchange(self._across, self._inside, self.layout.name_of, self._wire, self._habits)
        self._connected = True

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """Messages that all ranks exchange in one order. Who leaves early hangs up, so that no message of
        a repeat is taken for one that a peer still waits for."""
        try:
            yield
        except Refused as refusal:  # by all ranks, at the same message
            raise refusal.error from None
        except BaseException as error:
            self._connected = False
            self.topology.disconnect(self._across, self._inside)
            # gloo hangs up once nobody holds its messages, and the frames of this error's traceback do.
            traceback.clear_frames(error.__traceback__)
            raise

    def _agree(self, inner: Optimizer, wire: Wire) -> Layout:
        """The parameters as a flat vector, once all ranks have found that they agree on it.

        A rank that can't go on says so before it raises, so that the others do not wait for it.
        """
        setup: dict[str, Any] = {"wire version": VERSION, "sites": self.topology.num_sites}
        setup |= vars(self.settings) | wire.agreement()
        failure: Exception | None = None
        try:
            layout = Layout(inner)
            _check_denormals(layout.device)
            setup["parameters"] = layout.describe()
        except Exception as error:
            failure, layout = error, None
            setup = {"error": f"{type(error).__name__}: {error}"}
        try:
            agree_on_setup(self._everyone, self.topology.ranks_per_site, setup)
        except AgreementError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        assert layout is not None
        return layout

    def _encode(self, written_back: ExitStack) -> tuple[list[Tensor] | None, Encoded | None, Problem | None]:
        """The weights of this rank's slice and its part of the round, or why it has none."""
        try:
            self.layout.check_unchanged(self._inner)
            _check_denormals(self._device)
            weights = written_back.enter_context(self.layout.pieces(self.start, self.stop, write=True))
            encoded = kernels.encode(self.anchor, weights, self.residual, self._gate)
        except Exception as error:
            return None, None, Problem(Status.FAILED, seen=error)
        position = encoded.first_nonfinite
        if position < 0:
            return weights, encoded, None
        return weights, encoded, Problem(Status.NON_FINITE, self.layout.index_at(self.start + position))

    def _start_alike(self) -> None:
        """θ is site 0's weights, on all sites, verified; w = cast(θ)."""
        with torch.no_grad(), self.layout.pieces(self.start, self.stop, write=True) as weights:
            for part, w in zip(self.anchor.split([w.numel() for w in weights]), weights, strict=True):
                part.copy_(w)
            self._across.broadcast(self.anchor, phase="first anchor")
            kernels.write_weights(self.anchor, weights)
        with torch.no_grad():
            self._share_anchor_in_site()

        # Every rank tells every other what it sees, so that all of them refuse, or none.
        bad = self.anchor.isfinite().logical_not_().nonzero()
        first_bad = self.start + int(bad[0]) if bad.numel() else -1
        digest = kernels.digest(self.anchor)
        record = first_bad.to_bytes(8, "little", signed=True) + digest.to_bytes(8, "little")
        records = self._everyone.swap_records(record, phase="check of the first anchor")
        for rank, (raw, of_site_0) in enumerate(
            zip(
                records,
                records[: self.topology.ranks_per_site] * self.topology.num_sites,
                strict=True,
            )
        ):
            position = int.from_bytes(raw[:8], "little", signed=True)
            if position >= 0:
                name = self.layout.name_at(position)
                raise ValueError(f"parameter {name} is infinite or NaN on site 0")
            if raw != of_site_0:
                site = rank // self.topology.ranks_per_site
                raise ReplicaError(f"site {site} did not receive the anchor that site 0 sent")

    def _share_anchor_in_site(self) -> None:
        """Each rank of a site has the new θ of its slice; all need its cast."""
        if self._inside.size == 1:
            return
        for low, high in pairwise([*range(0, self._width, GATHER_ELEMENTS), self._width]):
            # Slices at the end may be shorter than the others, or empty: what lacks is not looked at.
            part = self.anchor.new_zeros(high - low)
            mine = self.anchor[low:high]
            part[: mine.numel()] = mine
            phase = f"round {self.rounds + 1}, anchor inside the site"
            for place, values in enumerate(self._inside.gather(part, phase=phase)):
                first = place * self._width + low
                last = min(first + high - low, (place + 1) * self._width, self.layout.numel)
                if place == self.topology.place or first >= last:
                    continue
                with self.layout.pieces(first, last, write=True) as weights:
                    kernels.write_weights(values[: last - first], weights)

    def _site_drift(self, encoded: bool) -> Problem | None:
        """The ranks of a site exchange slices of what must be one and the same model.

        A rank that could not encode votes for its own reason, and has no digest to compare.
        """
        if self._inside.size == 1:
            return None
        failure, mine = None, bytes(8)
        if encoded:
            try:
                with self.layout.pieces(0, self.layout.numel) as weights:
                    digests = b"".join(kernels.digest(w).to_bytes(8, "little") for w in weights)
                mine = hashlib.blake2b(digests, digest_size=8).digest()
            except Exception as error:
                failure = Problem(Status.FAILED, seen=error)
        phase = f"round {self.rounds + 1}, weights inside the site"
        known = {d for d in self._inside.swap_records(mine, phase=phase) if d != bytes(8)}
        return failure or (Problem(Status.SITE_DRIFT) if len(known) > 1 else None)

    def _bytes(self) -> tuple[int, int, int]:
        return self._across.sent_bytes, self._across.received_bytes, self._inside.sent_bytes

    def _identity(self) -> dict[str, Any]:
        """Whose state it is."""
        return {
            "site": self.topology.site,
            "num_sites": self.topology.num_sites,
            "place": self.topology.place,
            "ranks_per_site": self.topology.ranks_per_site,
            "parameters": self.layout.describe(),
        }


def _check_same(key: str, saved: Any, mine: Any) -> None:
    """Raise a ValueError that names the first thing in which a saved state differs."""
    if isinstance(mine, dict) and isinstance(saved, dict):
        for name in mine | saved:
            _check_same(name, saved.get(name), mine.get(name))
    elif saved != mine:
        if isinstance(mine, list) and isinstance(saved, list):
            pairs = [(a, b) for a, b in zip(saved, mine, strict=False) if a != b]
            saved, mine = pairs[0] if pairs else (len(saved), len(mine))
        raise ValueError(
            f"this state was saved with {key} = {saved}, this optimizer has {mine}: each rank loads the "
            f"state that it saved, into an optimizer built with the same settings"
        )


def _check_denormals(device: torch.device) -> None:
    """The sites' bits agree only if all of them keep denormals."""
    tiny = torch.full((1,), 2.0**-140, dtype=torch.float32, device=device)
    if float(tiny * 0.5) == 0.0:
        raise ValueError(
            "this process flushes denormal numbers to zero, so its bits would differ from the other sites': "
            "call torch.set_flush_denormal(False)"
        )
