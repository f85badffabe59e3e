"""Judges answers in other processes: a user's reward function may be slow, fail, or end its process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.tasks.problems import Problem
from experiments.tasks.prompts import Reward

_TRIES = 2
_FEW = 8  # answers; if so many are judged together and none succeeds, the function does not work


class Judge:
    """An actor: one process that calls the reward function."""

    def __init__(self, name: str, column: str) -> None:
        self._reward = Reward(name, column)

    def reward(self, row: dict[str, Any], text: str) -> float:
        return self._reward(row, text)


@dataclass
class _Case:
    """Answers that are judged together."""

    key: Hashable
    answers: Sequence[tuple[Problem, str]]
    rewards: list[float]
    left: int  # without a reward yet
    lost: int = 0  # whose reward is 0 because the function failed
    why: str = ""


@dataclass(frozen=True)
class _Call:
    case: _Case
    which: int  # of its answers
    attempt: int  # 1, 2, …
    judge: Any = None
    begun: float = 0.0


class Judges:
    """The judges of one worker, at work while it samples. A call that fails or takes too long is repeated
    once; then the reward is 0, which is counted and told."""

    def __init__(self, config: PipelineConfig, diary: Diary) -> None:
        assert config.prompts.reward is not None
        self._arguments = config.prompts.reward, config.prompts.column
        self._timeout_s, self._diary = config.reward_timeout_s, diary
        self._kind = ray.remote(num_cpus=0)(Judge)
        self._idle = [self._new() for _ in range(config.reward_processes)]
        self._waiting: deque[_Call] = deque()
        self._running: dict[Any, _Call] = {}
        self._done: list[_Case] = []
        self._told = False

    @property
    def are_busy(self) -> bool:
        return bool(self._waiting or self._running or self._done)

    def judge(self, key: Hashable, answers: Sequence[tuple[Problem, str]]) -> None:
        case = _Case(key, answers, [0.0] * len(answers), left=len(answers))
        self._waiting += [_Call(case, which, 1) for which in range(len(answers))]

    def judged(self, wait: float = 0.0) -> list[tuple[Hashable, list[float]]]:
        """What has been judged since the last call, by its key.

        Args:
            wait: seconds at most, if there is nothing yet.

        Raises:
            ExperimentError: none of several answers could be judged.
        """
        while self._waiting and self._idle:
            self._begin(self._waiting.popleft())
        if self._running:
            most = wait if not self._done else 0.0
            ended, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            if not ended and most:
                ended, _ = ray.wait(list(self._running), timeout=most)
            latest = time.monotonic() - self._timeout_s
            overdue = [one for one, call in self._running.items() if call.begun < latest and one not in ended]
            for one in ended:
                call = self._running.pop(one)
                self._ended(call, self._failure(one, call))
            for one in overdue:
                call = self._running.pop(one)
                self._ended(call, self._stop(call))
        done, self._done = self._done, []
        return [(case.key, case.rewards) for case in done]

    def _begin(self, call: _Call) -> None:
        judge, (problem, text) = self._idle.pop(), call.case.answers[call.which]
        asked = judge.reward.remote(problem.row, text)
        self._running[asked] = replace(call, judge=judge, begun=time.monotonic())

    def _ended(self, call: _Call, why: str | None) -> None:
        case = call.case
        if why is not None:
            self._diary.notes.counts["rewards that failed or took too long"] += 1
            if call.attempt < _TRIES:
                self._waiting.append(_Call(case, call.which, call.attempt + 1))
                return
            case.lost, case.why = case.lost + 1, why
        case.left -= 1
        if not case.left:
            self._done.append(case)
            if case.lost:
                self._tell(case)

    def _failure(self, ended: Any, call: _Call) -> str | None:
        """Keep what the call returned, and the judge if it lives. -> why it failed; None: it did not."""
        try:
            call.case.rewards[call.which] = ray.get(ended)
        except RayTaskError as error:
            self._idle.append(call.judge)
            return f"{type(error.cause).__name__}: {error.cause}"
        except RayActorError:
            self._idle.append(self._new())
            return "its process ended"
        self._idle.append(call.judge)
        return None

    def _stop(self, call: _Call) -> str:
        ray.kill(call.judge)
        self._idle.append(self._new())
        return f"it took more than {self._timeout_s:g} s (reward_timeout_s)"

    def _tell(self, case: _Case) -> None:
        self._diary.notes.counts["rewards given up, counted as 0"] += case.lost
        name, count = self._arguments[0], len(case.answers)
        if case.lost == count >= _FEW:
            raise ExperimentError(f"{name} judged none of {count} answers: {case.why}")
        if not self._told:
            self._told = True
            self._diary.say(f"{name} failed on {case.lost} of {count} answers, whose reward is 0: {case.why}")

    def _new(self) -> Any:
        return self._kind.remote(*self._arguments)
