"""Judges answers in other processes: a user's reward function may be slow, fail, or end its process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Call:
    which: int  # of the answers
    attempt: int  # 1, 2, …
    judge: Any
    begun: float


class Judges:
    """The judges of one worker. A call that fails or takes too long is repeated once; then the reward is 0,
    which is counted and told."""

    def __init__(self, config: PipelineConfig, diary: Diary) -> None:
        assert config.prompts.reward is not None
        self._arguments = config.prompts.reward, config.prompts.column
        self._timeout_s, self._diary = config.reward_timeout_s, diary
        self._kind = ray.remote(num_cpus=0)(Judge)
        self._idle = [self._new() for _ in range(config.reward_processes)]
        self._told = False

    def __call__(self, answers: Sequence[tuple[Problem, str]]) -> list[float]:
        """
        Raises:
            ExperimentError: none of several answers could be judged.
        """
        rewards = [0.0] * len(answers)
        waiting = deque((which, 1) for which in range(len(answers)))
        running: dict[Any, _Call] = {}
        lost, why = 0, ""
        while waiting or running:
            while waiting and self._idle:
                (which, attempt), judge = waiting.popleft(), self._idle.pop()
                problem, text = answers[which]
                call = judge.reward.remote(problem.row, text)
                running[call] = _Call(which, attempt, judge, time.monotonic())
            first = min(call.begun for call in running.values())
            left = max(0.0, first + self._timeout_s - time.monotonic())
            ended, _ = ray.wait(list(running), timeout=left)
            overdue = [] if ended else [one for one, call in running.items() if call.begun == first]
            for one in ended + overdue:
                call = running.pop(one)
                failure = self._failure(one, call, rewards) if ended else self._stop(call)
                if failure is None:
                    continue
                why = failure
                self._diary.notes.counts["rewards that failed or took too long"] += 1
                if call.attempt < _TRIES:
                    waiting.append((call.which, call.attempt + 1))
                else:
                    lost += 1
        if lost:
            self._tell(lost, len(answers), why)
        return rewards

    def _failure(self, ended: Any, call: _Call, rewards: list[float]) -> str | None:
        """Keep what the call returned, and the judge if it lives. -> why it failed; None: it did not."""
        try:
            rewards[call.which] = ray.get(ended)
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

    def _tell(self, lost: int, count: int, why: str) -> None:
        self._diary.notes.counts["rewards given up, counted as 0"] += lost
        name = self._arguments[0]
        if lost == count >= _FEW:
            raise ExperimentError(f"{name} judged none of {count} answers: {why}")
        if not self._told:
            self._told = True
            self._diary.say(f"{name} failed on {lost} of {count} answers, whose reward is 0: {why}")

    def _new(self) -> Any:
        return self._kind.remote(*self._arguments)
