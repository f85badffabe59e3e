"""`experiments.pipeline engine=vllm`: workers whose weights change between two of vLLM's steps."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from languages import save_tokenizer
from pipeline_parts import NobodysController
from plain_engine import keep_weights_plain, plugins
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import loco
from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.sampling.engine_vllm import VllmEngine
from experiments.tasks.rollout import Decoding, Question, Rollout

OPTIONS: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
REPOSITORY = Path(__file__).parents[2]
PATIENCE = 400.0  # seconds


def llama(seed: int) -> PreTrainedModel:
    """Of 257 words it says the last one, which ends an answer, hardly ever."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=256,
            eos_token_id=256,
            initializer_range=0.1,
        )
    )
    torch.nn.Module.to(made, torch.bfloat16)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(0).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path


def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Of each token but the first, in FP32 on the model's weights."""
    with torch.no_grad():
        logits = model.float()(tokens[None, :-1]).logits[0]
    return logits.log_softmax(dim=-1).gather(1, tokens[1:, None])[:, 0]


def test_a_token_has_the_probability_that_its_version_gives_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 comes while answers are sampled; the cache is made anew then."""
    keep_weights_plain(monkeypatch)
    first, second = llama(0), llama(1)
    publisher = loco.sync.Publisher(first, folder / "url")
    publisher.publish(1)
    with torch.no_grad():
        for old, new in zip(first.parameters(), second.parameters(), strict=True):
            old.copy_(new)
    publisher.publish(2)
    first, second_may_come, closing = llama(0), threading.Event(), threading.Event()

    def newer(version: int) -> int:
        if version == 1:
            second_may_come.wait()
        elif version == 2:
            closing.wait()
        return 2 if second_may_come.is_set() else 1

    config = PipelineConfig(
        model="hf", path=str(folder / "model"), engine="vllm", recompute_cache=True, vllm=OPTIONS
    )
    before = os.environ.get("LOCO_SYNC_URL")
    engine = VllmEngine(config, str(folder / "url"), Diary("worker", NobodysController()), newer)
    assert os.environ.get("LOCO_SYNC_URL") == before  # other engines may have other stores
    try:
        engine.wait_for(1)
        steps, step = 0, engine._llm.llm_engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            if steps == 20:
                second_may_come.set()
            return step()

        monkeypatch.setattr(engine._llm.llm_engine, "step", counted)
        decoding = Decoding(longest=200, stops=(256,))
        for key, prompt in enumerate(([5, 6, 7], [9, 8])):
            uniforms = torch.rand(2, 1, generator=torch.Generator().manual_seed(key))
            engine.add(Question(key=key, prompt=prompt, group=2, decoding=decoding, uniforms=uniforms))
        ended = dict[Hashable, Rollout]()
        while engine.active:
            ended |= dict(engine.step())
        found = Rollout.joined([ended[0], ended[1]])
    finally:
        closing.set()
        engine.close()
    seen: set[int] = set()
    for tokens, logp, versions in zip(found.tokens, found.logp, found.versions, strict=True):
        assert len(logp) == len(versions) <= 200
        assert versions.tolist() == sorted(versions.tolist())
        by_version = [log_probabilities(model, tokens)[-len(logp) :] for model in (first, second)]
        for version, own, other in ((1, *by_version), (2, *reversed(by_version))):
            chosen = versions == version
            if chosen.any():
                seen.add(version)
                # vLLM computes in BF16: half a percent of logits of up to 20.
                assert (logp - own)[chosen].abs().max() < 0.3
                assert (logp - other)[chosen].abs().mean() > 1
    assert seen == {1, 2}


def test_a_folder_that_vllm_can_not_load_is_one_sentence(folder: Path) -> None:
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NobodysModel"]}))
    settings = PipelineConfig(model="hf", path=str(folder / "model"), engine="vllm", vllm=OPTIONS)
    with pytest.raises(ExperimentError, match=f"vLLM can't load {folder / 'model'}: ") as raised:
        VllmEngine(settings, str(folder / "url"), Diary("worker", NobodysController()), lambda version: 0)
    assert "\n" not in str(raised.value)


def started(folder: Path, settings: str) -> subprocess.Popen[str]:
    """The command as a person runs it."""
    options = [f"vllm.{name}={str(value).lower()}" for name, value in OPTIONS.items()]
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(REPOSITORY / "configs")
    command = [sys.executable, "-m", "experiments.pipeline", "model=hf", "engine=vllm", "workers=1", *options]
    path = f"{plugins(folder / 'plugins')}:{REPOSITORY}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [*command, *settings.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """What a run that went well has found."""
    try:
        said, errors = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        raise AssertionError(run.communicate(timeout=60)) from None
    assert run.returncode == 0, errors
    found = json.loads((folder / "runs/pipeline/pipeline.json").read_text())
    assert f"s a step, {found['metric']} {found['evaluations'][-1]['score']:.4f}" in said
    assert len(set(found["digests"])) == 1
    return found


def test_sites_train_on_what_vllm_samples(folder: Path) -> None:
    settings = "preset=smoke path=model steps=48 sync_every=4 lease=4 lr=1e-4 arithmetic.largest=10"
    found = ended(started(folder, settings), folder)
    assert found["metric"] == "pass@1"
    assert found["evaluations"][-1]["step"] == 48
    assert {int(age) for age in found["staleness"]} <= {0, 1, 2}
    assert found["counts"]["updates"] > 3


def test_sharded_sites_learn_from_vllm_by_a_reward_of_ones_own_and_resume_to_the_bit(tmp_path: Path) -> None:
    """Chat messages, FSDP2 over two ranks of each site, and a run that is killed."""
    examples = REPOSITORY / "examples" / "own_model"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        make = [sys.executable, examples / "make.py", "own"]
        subprocess.run(make, cwd=tmp_path / name, check=True, capture_output=True)
    settings = "task=prompts path=own/model prompts.file=own/prompts.jsonl prompts.held_out=32"
    settings += f" prompts.reward={examples}/rewards.py:wanted answer.max_tokens=16 lr=2e-3 micro_batch=16"
    settings += " shard=true ranks_per_site=2 checkpoint_activations=true elastic=false save_every=2"
    settings += " max_staleness=0 in_flight=false sync_every=4 prompts.prompts=2 prompts.group=4"
    settings += " steps=40 eval_every=40"
    whole = ended(started(tmp_path / "whole", settings), tmp_path / "whole")
    first, last = (one["score"] for one in whole["evaluations"])
    assert (whole["metric"], len(whole["digests"])) == ("reward", 4)
    assert last > first + 0.2
    folder = tmp_path / "killed"
    killed = started(folder, settings)
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("runs/pipeline/checkpoints/site */round-00000004"))) < 2:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    found = ended(started(folder, f"{settings} resume=true"), folder)
    assert any("goes on after round" in text for text in found["said"])
    assert found["digests"] == whole["digests"]
    assert found["evaluations"][-1]["score"] == last
