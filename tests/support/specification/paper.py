"""The round as the specification states it, in numpy, one site after the other.

It shares nothing with the library: BF16 is rounded by arithmetic on the value, not on its bits.
"""

from dataclasses import dataclass, field

import numpy as np
from step_length import StepLength

F32 = np.float32


# Format: explicit bits of the mantissa, exponent of the least normal number, the largest number, and what
# takes the place of what is larger.
FORMATS = {
    "bf16": (7, -126, 2.0**128 * (1 - 2.0**-8), np.inf),
    "fp16": (10, -14, 65504.0, np.inf),
    "fp8_e4m3": (3, -6, 448.0, 448.0),
    "fp8_e5m2": (2, -14, 57344.0, 57344.0),
}


def to_format(x: np.ndarray, name: str) -> np.ndarray:
    """Round FP32 to the nearest value of a format, ties to even; the result is held in FP32."""
    mantissa, least, largest, beyond = FORMATS[name]
    exact = x.astype(np.float64)
    _, exponent = np.frexp(exact)
    # How far apart the format's numbers around x are.
    spacing = np.exp2((np.maximum(exponent - 1, least) - mantissa).astype(np.float64))
    rounded = np.rint(exact / spacing) * spacing  # a power of two: only rint rounds, half to even
    rounded = np.where(np.abs(rounded) > largest, np.copysign(beyond, exact), rounded)
    return np.where(np.isnan(exact), exact, rounded).astype(F32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    return to_format(x, "bf16")


def bf16_ulp(theta: np.ndarray) -> np.ndarray:
    """How far apart the BF16 numbers from |θ| on are, in float64."""
    _, exponent = np.frexp(theta.astype(np.float64))
    return np.exp2(np.where(theta == 0, -126, np.maximum(exponent - 1, -126)) - 7.0)


def in_steps(s: np.ndarray, theta: np.ndarray, value_steps: int) -> np.ndarray:
    """s to the nearest multiple of ulp(θ) / V that FP32 holds, ties to even."""
    step = bf16_ulp(theta) / value_steps
    last = 2.0**128 - step  # FP32 ends at 2^128; if its numbers are farther apart there, nothing is rounded
    return np.clip(np.rint(s.astype(np.float64) / step) * step, -last, last).astype(F32)


@dataclass
class Paper:
    """All sites of a run. `bf16[i]` says that parameter element i is stored in BF16."""

    anchor: np.ndarray
    bf16: np.ndarray
    sites: int
    lr: float | None  # None: it is found, by the rule of the outer step
    mu: float
    nesterov: bool
    gain: float = 1.0
    gate: str = "bf16"
    margin: float = 0.0
    value_steps: int | None = None
    sums_margin: float | None = None
    dense: bool = False
    counts: list[float] | None = None  # c, of each site; to be changed between rounds. None: each 1
    sent_counts: list[float] | None = None  # of the round that is applied next
    momentum: np.ndarray = field(init=False)
    residuals: list[np.ndarray] = field(init=False)
    sums: np.ndarray = field(init=False)  # of the latest round, before small ones go back

    def __post_init__(self) -> None:
        self.length = StepLength() if self.lr is None else None
        self.momentum = np.zeros_like(self.anchor)
        self.residuals = [np.zeros_like(self.anchor) for _ in range(self.sites)]

    @property
    def owner(self) -> np.ndarray:
        """Of each element: sites own equally many whole blocks of 256, but for the last ones."""
        blocks = -(-self.anchor.size // (256 * self.sites))
        return np.arange(self.anchor.size) // (256 * blocks)

    def cast(self, x: np.ndarray) -> np.ndarray:
        return np.where(self.bf16, to_bf16(x), x)

    def round(self, weights: list[np.ndarray]) -> list[int]:
        """One round after the inner steps left `weights`, one vector a site -> entries each site sent."""
        began = self.cast(self.anchor)
        updates = [self.update(site, began - w) for site, w in enumerate(weights)]
        self.sent_counts = self.counts
        chosen = [self.chosen(s) for s in updates]
        for site, (s, (send, v)) in enumerate(zip(updates, chosen, strict=True)):
            self.residuals[site] = np.where(send, s - v, s)
        total, returned = self.added_up(chosen)
        for site, (s, (send, v)) in enumerate(zip(updates, chosen, strict=True)):
            back = returned[site]
            left = np.where(send, v, F32(0))
            self.residuals[site][back] = s[back] - (left[back] - self.sums[back])
        self.outer_step(total)
        return [int(send.sum()) for send, _ in chosen]

    def update(self, site: int, moved: np.ndarray) -> np.ndarray:
        return F32(1 if self.counts is None else self.counts[site]) * moved + self.residuals[site]

    def chosen(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a site sends of s: where, and which values."""
        theta, v = self.anchor, s
        if self.dense:
            send = np.ones(theta.shape, dtype=bool)
        else:
            send = to_format(theta, self.gate) != to_format(theta - F32(self.gain) * s, self.gate)
        if self.margin:
            send &= np.abs(s) > F32(self.margin) * bf16_ulp(theta).astype(F32)
        if self.value_steps:
            v = in_steps(s, theta, self.value_steps)
            send &= v != 0
        return send, v

    def added_up(self, chosen: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The sum of what all sites sent, and where it goes back to each of them instead: into its e."""
        total = np.zeros_like(self.anchor)
        for send, v in chosen:
            total = np.where(send, total + v, total)
        self.sums = total.copy()
        small = np.zeros(total.shape, dtype=bool)
        if self.sums_margin:
            count = sum(map(F32, self.sent_counts or [1.0] * self.sites), np.float64(0))
            small = np.abs(total) <= F32(self.sums_margin * count) * bf16_ulp(self.anchor).astype(F32)
            total[small] = 0
        return total, [small & (self.owner == site) for site in range(self.sites)]

    def outer_step(self, total: np.ndarray) -> None:
        counts = self.sent_counts or [1.0] * self.sites
        g = total / F32(sum(map(F32, counts), np.float64(0)))
        lr = F32(self.lr if self.length is None else self.length.of_round(g, self.anchor))
        mu = F32(self.mu)
        self.momentum = mu * self.momentum + g
        if self.mu == 0:
            self.anchor = self.anchor - lr * g
        elif self.nesterov:
            self.anchor = self.anchor - lr * (g + mu * self.momentum)
        else:
            self.anchor = self.anchor - lr * self.momentum


@dataclass
class OverlappedPaper(Paper):
    """Rounds that are applied one boundary late.

    began: ŵ of each site, which its inner steps began from.
    flying: what each site has sent and θ lacks.
    """

    beta: float | None = None  # None: as far as the outer step goes
    began: list[np.ndarray] = field(init=False)
    flying: list[tuple[np.ndarray, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta is None and self.lr is not None:
            self.beta = self.lr * (1 + self.mu) if self.nesterov else self.lr
        self.flying = []
        self.began = [self.cast(self.anchor)] * self.sites

    def boundary(self, weights: list[np.ndarray]) -> None:
        self.land()
        self.flying = [self.sends(site, w) for site, w in enumerate(weights)]
        self.sent_counts = self.counts

    def sends(self, site: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> v of one site, and where it has one; with this θ."""
        s = self.update(site, self.began[site] - w)
        send, v = self.chosen(s)
        self.residuals[site] = np.where(send, s - v, s)
        beta = F32(self.length.lr if self.length and self.beta is None else self.beta)
        self.began[site] = self.cast(np.where(send, self.anchor - beta * v, self.anchor))
        return send, v

    def land(self) -> None:
        """The round that is on its way is applied."""
        if not self.flying:
            return
        total, returned = self.added_up(self.flying)
        for residual, back in zip(self.residuals, returned, strict=True):
            residual[back] += self.sums[back]
        self.outer_step(total)
        self.flying = []

    def fail(self) -> None:
        """The round that is on its way does not count."""
        for residual, (send, v) in zip(self.residuals, self.flying, strict=True):
            residual[send] += v[send]
        self.flying = []

    def sync(self, weights: list[np.ndarray]) -> None:
        self.boundary(weights)
        self.land()
        self.began = [self.cast(self.anchor)] * self.sites


def plain_digest(data: bytes) -> int:
    """What a message's header says of its body."""
    data += bytes(-len(data) % 4)
    total = 0
    for i in range(len(data) // 4):
        k = i * 0x9E3779B1 % 2**32
        v = (int.from_bytes(data[4 * i : 4 * i + 4], "little") + k) % 2**32
        v ^= v >> 15
        total += v * (k | 1)
    return total % 2**64
