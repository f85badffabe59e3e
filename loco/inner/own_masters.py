"""Noticing an inner optimizer that keeps FP32 masters of its own: it undoes every round.

Such an optimizer steps its masters and copies them into parameters of 16 bits. A round sets w = cast(θ), of
which the masters know nothing, so the next step puts w back where it was before the round.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..parameters.flat_parameters import FlatParameters
from .several import each_of

_LOOKED_AT = 1 << 18  # elements of an optimizer, at most about this many
_ENOUGH = 64  # elements to judge by, of one round or of several
_SHARE = 0.5  # of them that must have gone back; without masters less than a third does


class OwnMasters:
    """Watches w around each round, of all inner optimizers.

    It looks at elements that no step of this site had moved when the round moved them. The next step of an
    optimizer without masters moves few of these back, and by another amount; one with masters moves nearly
    all of them back by just as much. torch's own optimizers have no masters, and are not watched.
    """

    def __init__(self, inner: Optimizer, parameters: FlatParameters) -> None:
        watches = [_Watch(one, parameters) for one in each_of(inner) if not _is_torchs(one)]
        self._watches = [watch for watch in watches if watch.holds_any]
        self.problem = ""

    def forget(self) -> None:
        """The state was replaced: nothing is known of what was before."""
        self.problem = ""
        for watch in self._watches:
            watch.forget()

    def before_first_step(self) -> None:
        """Call it before the first step after a round, when w = cast(θ)."""
        for watch in self._watches:
            watch.begin()

    def after_first_step(self, round: int) -> None:
        for watch in self._watches:
            self.problem = self.problem or watch.problem(round)

    def before_round(self) -> None:
        for watch in self._watches:
            watch.end = watch.sample()

    def check(self) -> None:
        """
        Raises:
            ValueError: an optimizer undoes the rounds.
        """
        if self.problem:
            raise ValueError(self.problem)


class _Watch:
    """Of one optimizer's parameters of 16 bits.

    Attributes:
        end: w when the inner steps of this round had ended.
    """

    def __init__(self, optimizer: Optimizer, parameters: FlatParameters) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        described = zip(parameters.params, parameters.dtypes, parameters.tensors, strict=True)
        sizes = {
            k: t.numel() for k, (p, dtype, t) in enumerate(described) if id(p) in own and dtype.itemsize == 2
        }
        numel = sum(sizes.values())
        self.holds_any = numel > 0
        self._parameters, self._numbers, self._name = parameters, list(sizes), type(optimizer).__name__
        self._stride = numel // _LOOKED_AT | 1  # odd, so that it does not stay in one column of a matrix
        self.forget()

    def forget(self) -> None:
        self._start: Tensor | None = None  # w when the inner steps of this round began
        self.end: Tensor | None = None
        self._moved: tuple[Tensor, Tensor, Tensor] | None = None  # by the round alone: which, from, to
        self._seen = self._back = 0  # elements, since the last judgement

    @torch.no_grad()
    def sample(self) -> Tensor:
        tensors = self._parameters.tensors
        return torch.cat([tensors[k].reshape(-1)[:: self._stride] for k in self._numbers]).float()

    def begin(self) -> None:
        now = self.sample()
        self._moved = None
        if self._start is not None and self.end is not None:
            at = ((self.end == self._start) & (now != self.end)).nonzero().squeeze(1)
            self._moved = (at, self.end[at], now[at])
        self._start, self.end = now, None

    def problem(self, round: int) -> str:
        """What the first step after a round says against this optimizer; "" if nothing."""
        if self._moved is None:
            return ""
        (at, before, after), self._moved = self._moved, None
        self._seen += len(at)
        self._back += int(((self.sample()[at] - before).abs() <= (after - before).abs() / 4).sum())
        if self._seen < _ENOUGH:
            return ""
        share, self._seen, self._back = self._back / self._seen, 0, 0
        if share < _SHARE:
            return ""
        return (
            f"the inner optimizer undoes the rounds: its next step put back {share:.0%} of the sampled "
            f"weights that round {round} had moved. {self._name}, it seems, keeps FP32 masters of its own "
            f"and copies them into the parameters, which have 16 bits. Build it on the FP32 masters "
            f'themselves, or on FP32 parameters: docs/optimizer.md says how, under "Parameters of 16 bits"'
        )


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
