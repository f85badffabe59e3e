"""What a run measured, what follows from it, and its file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}  # bits per second, each way


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    scores: dict[str, float]  # by name, over the held-out set
    sent_bytes: float  # by then, mean over ranks


@dataclass(frozen=True, kw_only=True)
class Round:
    """One exchange, over all ranks."""

    round: int
    step: int
    density: float  # mean over ranks
    residual_norm: float  # root mean square over sites
    payload_bytes: float  # this and the next one: mean over ranks
    sent_bytes: float
    exchange: str
    outer_lr: float | None = None  # α
    # Where PULSELoCo's gate was watched; means over ranks.
    union_density: float | None = None
    visible: float | None = None
    age: float | None = None

    @staticmethod
    def joined(ranks: Sequence[dict[str, Any]], *, sites: int) -> Round:
        """One round from what all ranks measured of it."""
        names = ("payload_bytes", "sent_bytes", "union_density", "visible", "age")
        given: dict[str, Any] = {name: ranks[0][name] for name in ("round", "step", "exchange", "outer_lr")}
        given |= {name: fmean(one[name] for one in ranks) for name in names if name in ranks[0]}
        given["density"] = sum(one["entries"] for one in ranks) / max(1, sum(one["numel"] for one in ranks))
        # The ranks of a site hold parts of one residual: their squares add up.
        given["residual_norm"] = math.sqrt(sum(one["residual_norm"] ** 2 for one in ranks) / sites)
        return Round(**given)


@dataclass(frozen=True, kw_only=True)
class Result:
    label: str
    config: dict[str, Any]  # of the run, in full
    metric: str  # the score that decides
    higher_is_better: bool
    ranks: int
    sites: int
    parameters: int
    evaluations: tuple[Evaluation, ...]  # the first is the warm start
    rewards: tuple[float, ...]  # mean over ranks of each round's rollouts; empty without rewards
    rounds: tuple[Round, ...]  # empty for a single trainer and for DDP
    one_step_density: float  # share of BF16 casts that one late inner step changes

    # Per rank, mean over ranks, for the whole run.
    sent_bytes: float
    received_bytes: float
    bytes_source: str  # of the two above: counted (by loco), kernel (TCP) or computed (ring formula)
    accounted_bytes: float  # sent, without the kernel's help: counted or computed
    kernel_sent_bytes: float | None  # None where the OS does not count
    exchange_seconds: float  # waiting for the network and for the other ranks
    round_seconds: float  # the rounds' own work: encode and apply
    step_seconds: float  # median of forward, backward and inner step
    rollout_seconds: float
    seconds: float  # wall clock of the run, evaluations included
    machine: dict[str, Any]

    @property
    def method(self) -> str:
        return self.config["method"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def steps(self) -> int:
        return self.config["steps"]

    @property
    def first(self) -> float:
        return self.evaluations[0].scores[self.metric]

    @property
    def final(self) -> float:
        return self.evaluations[-1].scores[self.metric]

    @property
    def gain(self) -> float:
        """Improvement over the warm start, positive if it is one."""
        return self.gained(self.metric)

    def gained(self, score: str) -> float:
        difference = self.evaluations[-1].scores[score] - self.evaluations[0].scores[score]
        return difference if self.higher_is_better else -difference

    @property
    def density(self) -> float | None:
        return self.steady("density")

    def steady(self, name: str) -> float | None:
        """A round's figure, its mean over the second half of the rounds: the first ones start on the BF16
        grid, and are sparser."""
        values = [getattr(r, name) for r in self.rounds[len(self.rounds) // 2 :]]
        return None if not values or None in values else fmean(values)

    @property
    def payload_per_parameter(self) -> float | None:
        """Bytes per parameter of all that a site has to say in a steady round; a dense FP32 round has 4.

        Where sites sum slices, a site keeps the part of its payload that it sums itself, one of R; it counts
        here as the others do.
        """
        steady = self.rounds[len(self.rounds) // 2 :]
        if not steady:
            return None
        slices = self.ranks // self.sites  # of a site's own ranks, each with its part
        whole = [
            r.payload_bytes * (1 if r.exchange == "gather" else self.sites / (self.sites - 1)) for r in steady
        ]
        return slices * fmean(whole) / self.parameters

    def projected_hours(self, bits_per_second: float, *, step_seconds: float) -> float:
        """This run with its bytes sent at that rate: bandwidth only, no latency, nothing overlapped."""
        transfer = max(self.sent_bytes, self.received_bytes) * 8 / bits_per_second
        return (self.steps * step_seconds + self.rollout_seconds + self.round_seconds + transfer) / 3600


def fields_of(result: Result) -> dict[str, Any]:
    """As JSON has it, floats to six digits or nine: rounds are columns, and a column of equal values is one
    value."""
    found = dataclasses.asdict(result)
    names = found["rounds"][0] if found["rounds"] else []
    columns = {name: [_short(one[name]) for one in found["rounds"]] for name in names}
    found["rounds"] = {k: v[0] if len(set(v)) == 1 < len(v) else v for k, v in columns.items()}
    found["evaluations"] = [[e["step"], e["scores"], _short(e["sent_bytes"])] for e in found["evaluations"]]
    found["rewards"] = [_short(reward) for reward in found["rewards"]]
    return found


def of_fields(fields: dict[str, Any]) -> Result:
    """From what `fields_of` makes of one. Columns of rounds that are no longer kept are left out."""
    rest, known = dict(fields), {item.name for item in dataclasses.fields(Round)}
    columns = {name: values for name, values in fields["rounds"].items() if name in known}
    count = len(columns.get("round", ()))
    whole = {k: v if isinstance(v, list) else [v] * count for k, v in columns.items()}
    rounds = (dict(zip(whole, values, strict=True)) for values in zip(*whole.values(), strict=True))
    rest["rounds"] = tuple(Round(**one) for one in rounds)
    names = ("step", "scores", "sent_bytes")
    rest["evaluations"] = tuple(Evaluation(**dict(zip(names, e, strict=True))) for e in fields["evaluations"])
    rest["rewards"] = tuple(fields["rewards"])
    return Result(**rest)


def store(result: Result, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(fields_of(result)) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read(path: Path) -> Result:
    """A file that `store` wrote."""
    return of_fields(json.loads(path.read_text(encoding="utf-8")))


def _short(value: Any) -> Any:
    """Bytes are whole as long as they have no more than nine digits."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.9g}") if abs(value) >= 1e3 else float(f"{value:.6g}")
    return int(short) if short.is_integer() else short
