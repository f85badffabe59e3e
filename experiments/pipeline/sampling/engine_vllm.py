"""Sampling with vLLM, whose weights change between two of its steps.

The engine runs in the worker's process and gives each sequence one token per step, so the version that gave
a token is known. Prefix caching is off: cached prefixes would be of older weights.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

import loco
from experiments.errors import ExperimentError
from experiments.models.huggingface import HuggingFaceWords
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.sampling.engine import Newer
from experiments.tasks.rollout import Question, Rollout, Words, text_of
from loco.integrations.engines.vllm_source import URL_VARIABLE

_PAUSE = 0.05  # seconds, while nothing but a new version is waited for
_AHEAD = 0.1  # seconds in which a version is fetched while the engine goes on


class _Answers:
    """What there is of the answers to a question."""

    def __init__(self, question: Question) -> None:
        self.question, self.going = question, question.group
        self.tokens: list[list[int]] = [[] for _ in range(question.group)]
        self.logp: list[list[float]] = [[] for _ in range(question.group)]
        self.versions: list[list[int]] = [[] for _ in range(question.group)]

    @property
    def has_begun(self) -> bool:
        return any(self.tokens)

    def rollout(self, words: Words) -> Rollout:
        return Rollout(
            texts=[text_of(words, answer, self.question.decoding) for answer in self.tokens],
            tokens=[torch.tensor([*self.question.prompt, *answer]) for answer in self.tokens],
            logp=[torch.tensor(values) for values in self.logp],
            versions=[torch.tensor(values) for values in self.versions],
        )


class VllmEngine:
    def __init__(self, config: PipelineConfig, url: str, diary: Diary, newer: Newer) -> None:
        assert config.path is not None
        self._config, self._diary, self._received = config, diary, diary.beside("store")
        self._words = HuggingFaceWords(Path(config.path))
        self._llm = _load(config)
        with _allowed(url):
            self._llm.init_weight_transfer_engine({"init_info": {"url": url}})
        self.version, self.hold = 0, False
        self._asked_for: dict[Hashable, _Answers] = {}
        self._places: dict[str, tuple[Hashable, int]] = {}  # of each request: of what, and which answer
        self._numbers = count()
        self._newest = self._asked = 0  # newest published version, and the one that is being fetched
        self._asked_at = 0.0
        self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(newer,), name="look", daemon=True)
        self._thread.start()

    @property
    def words(self) -> Words:
        return self._words

    @property
    def model(self) -> None:
        return None

    @property
    def room(self) -> int:
        return self._llm.llm_engine.model_config.max_model_len

    @property
    def active(self) -> int:
        return len(self._places)

    def add(self, question: Question) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        key, decoding = question.key, question.decoding
        self._asked_for[key] = _Answers(question)
        for place in range(question.group):
            chosen = SamplingParams(
                temperature=decoding.temperature,
                max_tokens=decoding.longest,
                seed=int(question.uniforms[place, 0] * 2**31) if decoding.temperature else None,
                stop_token_ids=list(decoding.stops),
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = str(next(self._numbers))
            self._places[name] = key, place
            request: Any = {"prompt_token_ids": question.prompt}
            self._llm.llm_engine.add_request(name, request, chosen)

    def step(self) -> list[tuple[Hashable, Rollout]]:
        has_begun = any(one.has_begun for one in self._asked_for.values())
        if not self.hold and (self._config.in_flight or not has_begun):
            self._take()
        ended = []
        for one in self._llm.llm_engine.step():
            (key, place), found = self._places[one.request_id], one.outputs[0]
            asked = self._asked_for[key]
            asked.tokens[place] += found.token_ids
            for token, likely in zip(found.token_ids, found.logprobs, strict=True):
                asked.logp[place].append(likely[token].logprob)
                asked.versions[place].append(self.version)
            if one.finished:
                del self._places[one.request_id]
                asked.going -= 1
                if not asked.going:
                    ended.append((key, self._asked_for.pop(key).rollout(self._words)))
        return ended

    def wait_for(self, version: int) -> None:
        while self.version < version:
            self._take(now=True)
            if self.version < version:
                time.sleep(_PAUSE)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._received.send()
        self._llm.llm_engine.engine_core.shutdown()

    def _take(self, *, now: bool = False) -> None:
        """Begin to fetch the newest version, and switch to it once it has had time to arrive."""
        clock = time.monotonic()
        if not self._asked:
            if self._newest <= self.version:
                return
            self._llm.start_weight_update()
            self._asked, self._asked_at = self._newest, clock
        if not now and clock - self._asked_at < _AHEAD:
            return
        asked, self._asked, begun = self._asked, 0, time.time()
        try:
            self._llm.update_weights({"update_info": {"version": asked}})
        except (loco.sync.SyncError, OSError) as error:
            if not self._failed:
                self._diary.say(f"no newer weights for now: {error}")
            self._failed = True
            return
        finally:
            self._llm.finish_weight_update(f"version {asked}")
        self.version, self._failed = asked, False
        self._received.did("receiving", begun, version=asked)
        self._diary.notes.counts["updates"] += 1
        if self._config.recompute_cache:
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def _look(self, newer: Newer) -> None:
        while not self._ended.is_set():
            self._newest = newer(self._newest)


@contextmanager
def _allowed(url: str) -> Iterator[None]:
    """The engine, which runs in this process, may send its token to this store."""
    before = os.environ.get(URL_VARIABLE)
    os.environ[URL_VARIABLE] = url
    try:
        yield
    finally:
        del os.environ[URL_VARIABLE]
        if before is not None:
            os.environ[URL_VARIABLE] = before


def _load(config: PipelineConfig) -> Any:
    # Run the engine in this process; vLLM reads this when it is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    own: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "generation_config": "vllm",  # the model's own would add ends, and change how is sampled
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "weight_transfer_config": WeightTransferConfig(backend="loco"),
    }
    try:
        return LLM(str(config.path), **(own | config.vllm))
    except Exception as error:  # vLLM raises errors of many types for a bad folder or option
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ExperimentError(f"vLLM can't load {config.path}: {first}") from error
