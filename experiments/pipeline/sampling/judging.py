"""Judges answers in other processes: a user's reward function may be slow, fail, or end its process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.settings.tasks import PromptsConfig
from experiments.tasks.problems import Problem
from experiments.tasks.prompts import Reply, judge_of

Said = str | list[str]  # an answer; or, of a conversation, all of the model's turns so far
_TRIES = 2
_MOST_LOST = 8  # answers in a row that can't be judged, before the function counts as one that does not work


class Judge:
    """An actor: one process that calls the reward function, or the environment."""

    def __init__(self, config: PromptsConfig) -> None:
        self._judge: Any = judge_of(config)

    def ready(self) -> None:
        """The process has started, and the function's file is imported."""

    def judge(self, row: dict[str, Any], said: Any) -> Any:
        return self._judge(row, said)


@dataclass
class _Case:
    """Answers that are judged together."""

    key: Hashable
    answers: Sequence[tuple[Problem, Said]]
    found: list[Any]
    is_urgent: bool
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
    once; then the reward is 0, which is counted and told, and a conversation is over."""

    def __init__(self, config: PipelineConfig, diary: Diary) -> None:
        assert config.prompts.judge is not None
        self._config, self._name = config.prompts, config.prompts.judge
        self._nothing: Any = 0.0 if config.prompts.environment is None else Reply()
        self._timeout_s, self._diary = config.reward_timeout_s, diary
        self._kind: Any = ray.remote(num_cpus=0)(Judge)
        self._starting: dict[Any, Any] = {}  # judges, by the calls that say when they are ready
        self._idle: list[Any] = []
        self._waiting: deque[_Call] = deque()
        self._urgent: deque[_Call] = deque()  # for which trainers may wait
        self._running: dict[Any, _Call] = {}
        self._done: list[_Case] = []
        self._told, self._lost_in_a_row = False, 0
        for _ in range(config.reward_processes):
            self._start()

    @property
    def are_busy(self) -> bool:
        return bool(self._urgent or self._waiting or self._running or self._done)

    def judge(
        self, key: Hashable, answers: Sequence[tuple[Problem, Said]], *, is_urgent: bool = True
    ) -> None:
        case = _Case(key, answers, [self._nothing] * len(answers), is_urgent, left=len(answers))
        self._queue(case).extend(_Call(case, which, 1) for which in range(len(answers)))

    def judged(self, wait: float = 0.0) -> list[tuple[Hashable, list[Any]]]:
        """What has been judged since the last call, by its key: rewards, or an environment's replies.

        Args:
            wait: seconds at most, if there is nothing yet.

        Raises:
            ExperimentError: none of several answers could be judged.
        """
        self._welcome()
        while self._idle and (self._urgent or self._waiting):
            self._begin((self._urgent or self._waiting).popleft())
        calls = [*self._running, *self._starting]
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        if not ended and not self._done and wait:
            ray.wait(calls, timeout=wait)
        latest = time.monotonic() - self._timeout_s
        for one, call in list(self._running.items()):
            if one in ended:
                del self._running[one]
                self._ended(call, self._failure(one, call))
            elif call.begun < latest:
                del self._running[one]
                self._ended(call, self._stop(call))
        done, self._done = self._done, []
        return [(case.key, case.found) for case in done]

    def _queue(self, case: _Case) -> deque[_Call]:
        return self._urgent if case.is_urgent else self._waiting

    def _start(self) -> None:
        judge = self._kind.remote(self._config)
        self._starting[judge.ready.remote()] = judge

    def _welcome(self) -> None:
        """Those that have started: importing the function's file may take long, and is on nobody's clock."""
        if not self._starting:
            return
        for one in ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)[0]:
            judge = self._starting.pop(one)
            try:
                ray.get(one)
            except RayError as error:
                raise ExperimentError(f"{self._name}: its process does not start: {_cause(error)}") from error
            self._idle.append(judge)

    def _begin(self, call: _Call) -> None:
        judge, (problem, said) = self._idle.pop(), call.case.answers[call.which]
        asked = judge.judge.remote(problem.row, said)
        self._running[asked] = replace(call, judge=judge, begun=time.monotonic())

    def _ended(self, call: _Call, why: str | None) -> None:
        case = call.case
        if why is not None:
            self._diary.notes.counts["rewards that failed or took too long"] += 1
            if call.attempt < _TRIES:
                self._queue(case).append(_Call(case, call.which, call.attempt + 1))
                return
            case.lost, case.why = case.lost + 1, why
        self._lost_in_a_row = self._lost_in_a_row + 1 if why is not None else 0
        if self._lost_in_a_row == _MOST_LOST:
            raise ExperimentError(f"{self._name} failed on {_MOST_LOST} answers in a row: {why}")
        case.left -= 1
        if not case.left:
            self._done.append(case)
            if case.lost:
                self._tell(case)

    def _failure(self, ended: Any, call: _Call) -> str | None:
        """Keep what the call returned, and the judge if it lives. -> why it failed; None: it did not."""
        try:
            call.case.found[call.which] = ray.get(ended)
        except RayTaskError as error:
            self._idle.append(call.judge)
            return _cause(error)
        except RayError:
            self._start()
            return "its process ended"
        self._idle.append(call.judge)
        return None

    def _stop(self, call: _Call) -> str:
        ray.kill(call.judge)
        self._start()
        return f"it took more than {self._timeout_s:g} s (reward_timeout_s)"

    def _tell(self, case: _Case) -> None:
        self._diary.notes.counts["rewards given up, counted as 0"] += case.lost
        if not self._told:
            self._told, of = True, f"{case.lost} of {len(case.answers)} answers"
            self._diary.say(f"{self._name} failed on {of}, whose reward is 0: {case.why}")


def _cause(error: RayError) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
