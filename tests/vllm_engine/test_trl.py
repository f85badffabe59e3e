"""TRL's trainers train, and a vLLM server generates from what they publish."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plain_engine
import pytest
from models import SIZES, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.generation.vllm_client import VLLMClient
from trl_trainers import STEPS, async_trainer, trainer
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm_server import OPTIONS, Server, running

from loco.integrations.trl import WeightTransfer, send_patches
from loco.sync import Published, SyncError
from loco.sync.storage.server import SyncServer, serve

WORDS = SIZES["vocab_size"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), *OPTIONS) as found:
        yield found


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    save("llama", folder / "model")
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "w0", "eos_token": "w1", "pad_token": "w2", "unk_token": "w3"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    tokenizer.save_pretrained(folder / "model")
    more = ["--logprobs-mode=processed_logprobs", "--max-logprobs=-1"]
    more += ["--served-model-name", "tiny", str(folder / "model")]  # AsyncGRPOTrainer asks for the path
    with running(folder, folder / "model", *options, *more) as found:
        yield found


@pytest.fixture
def folder_server(tmp_path: Path) -> Iterator[SyncServer]:
    (tmp_path / "url").mkdir()
    with serve(tmp_path / "url", port=0) as found:
        yield found


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


class Watch(TrainerCallback):
    """After each step: what was published for it, and what the server holds."""

    def __init__(self, server: Server, transfer: WeightTransfer) -> None:
        self.server, self.transfer = server, transfer
        self.published: list[Published] = []
        self.held: list[dict[str, str]] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.note()

    def note(self) -> None:
        assert self.transfer.published is not None
        self.published.append(self.transfer.published)
        self.held.append(self.server.checksums())


Answers = list[tuple[list[int], list[float]]]  # of each prompt: greedy tokens, and their log-probabilities


def answers(server: Server) -> Answers:
    client, found = VLLMClient(url_of(server)), []
    for prompt in plain_engine.PROMPTS:
        more = {"ignore_eos": True}
        answer: Any = client.generate([prompt], temperature=0.0, max_tokens=12, generation_kwargs=more)
        found.append((answer["completion_ids"][0], [chosen[0] for chosen in answer["logprobs"][0]]))
    return found


def fresh(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], Answers]:
    plain_engine.keep_weights_plain(monkeypatch)
    engine = plain_engine.build(checkpoint)
    found = [plain_engine.generate(engine, [prompt]) for prompt in plain_engine.PROMPTS]
    digests = engine.apply_model(compute_tensor_digests)[0]
    return digests, [(tokens[0], logprobs[0]) for tokens, logprobs in found]


def sent_patches(reports: list[Published]) -> None:
    first, *others = reports
    assert [one.version for one in reports] == list(range(1, STEPS + 2))
    assert "first" in first.reason
    for one in others:
        assert not one.reason
        assert 0 < one.entries < one.numel / 4
        assert one.bytes < one.dense_bytes / 8


def test_a_server_of_another_backend_is_told_how_to_start(tmp_path: Path) -> None:
    others = [option for option in OPTIONS if "weight-transfer" not in option]
    how = "start the vLLM server by VLLM_SERVER_DEV_MODE=1 vllm serve"
    with serving(tmp_path, *others) as server:
        with pytest.raises(SyncError, match=f"the weight transfer backend None, not 'loco': {how}"):
            WeightTransfer(str(tmp_path / "url"), server=url_of(server)).init_weight_transfer()
        with pytest.raises(SyncError, match=rf"there is no http://.*/v1/server_info.*: {how}"):
            WeightTransfer(str(tmp_path / "url"), server=url_of(server) + "/v1/").init_weight_transfer()
        with pytest.raises(SyncError, match="not 'loco'"), send_patches(str(tmp_path / "url")):
            trainer(url_of(server), server.folder / "model", tmp_path / "run")
    with pytest.raises(SyncError, match="does not answer /server_info"):
        WeightTransfer(str(tmp_path / "url"), server=url_of(server)).init_weight_transfer()


def test_a_server_generates_from_each_steps_weights_and_reads_what_changed(
    server: Server,
    tmp_path: Path,
    folder_server: SyncServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "loco.sync.storage")
    key_file = tmp_path / "key"
    key_file.write_bytes(os.urandom(32))
    where = {"read_url": folder_server.url, "key_file": str(key_file)}
    with send_patches(str(tmp_path / "url"), **where) as transfer:
        watch = Watch(server, transfer)
        grpo = trainer(url_of(server), server.folder / "model", tmp_path / "run", watch)
    before = answers(server)
    grpo.train()
    grpo.vllm_generation.sync_weights()  # the server had the weights that the last step began with
    watch.note()
    assert server.call("/weight_info", method="GET") == {"weight_version": str(STEPS + 1)}
    folders = [server.folder / "model", *(tmp_path / f"run/checkpoint-{step + 1}" for step in range(STEPS))]
    expected = [fresh(folder, monkeypatch) for folder in folders]
    assert watch.held == [digests for digests, _ in expected]
    assert len({str(digests) for digests in watch.held}) == STEPS + 1
    assert before == expected[0][1]
    assert answers(server) == expected[-1][1]
    assert before != expected[-1][1]
    sent_patches(watch.published)
    read = [one.getMessage() for one in caplog.records if "/weights/" in one.getMessage()]
    assert len(read) == STEPS
    assert all(f"from-{version:012}" in one for version, one in enumerate(read, 1))


def test_async_grpo_takes_it_as_its_weight_transfer(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(server, WeightTransfer(str(tmp_path / "url"), server=url_of(server)))
    async_trainer(watch.transfer, server.folder / "model", tmp_path / "run", watch, monkeypatch).train()
    watch.note()  # it sends after each step
    digests, answered = fresh(tmp_path / f"run/checkpoint-{STEPS}", monkeypatch)
    assert watch.held[-1] == digests
    assert len({str(digests) for digests in watch.held}) == STEPS + 1
    assert answers(server) == answered
    assert server.call("/is_paused", method="GET") == {"is_paused": False}
    sent_patches(watch.published)


def test_a_server_that_cant_read_the_versions_ends_the_training_and_keeps_its_weights(
    server: Server, tmp_path: Path
) -> None:
    before = server.checksums()
    with send_patches(str(tmp_path / "url"), read_url=str(tmp_path / "elsewhere")):
        grpo = trainer(url_of(server), server.folder / "model", tmp_path / "run")
    told = r"reads .*elsewhere, did not take version 1: .* at /update_weights: .* has no version 1"
    with pytest.raises(SyncError, match=told):
        grpo.train()
    assert server.checksums() == before
    assert server.call("/is_paused", method="GET") == {"is_paused": False}
    assert len(answers(server)) == len(plain_engine.PROMPTS)


def test_rloo_sends_patches_too(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with send_patches(str(tmp_path / "url")) as transfer:
        rloo = trainer(url_of(server), server.folder / "model", tmp_path / "run", rloo=True)
    rloo.train()
    assert transfer.published is not None
    assert transfer.published.version == STEPS
    assert not transfer.published.reason
    checkpoint = tmp_path / f"run/checkpoint-{STEPS - 1}"  # that the last step began with
    assert (server.checksums(), answers(server)) == fresh(checkpoint, monkeypatch)


def test_the_first_of_two_ranks_publishes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).with_name("trl_trainers.py")), url_of(server)]
    command += [str(path) for path in (server.folder / "model", tmp_path / "run", tmp_path / "url")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"Published(version={STEPS + 1}, reason='',") == 1
    expected = fresh(tmp_path / f"run/checkpoint-{STEPS}", monkeypatch)
    assert (server.checksums(), answers(server)) == expected


def test_a_trainer_that_asks_no_server_is_told(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no trainer in this block"), send_patches(str(tmp_path / "url")):
        trainer(url_of(server), server.folder / "model", tmp_path / "run", use_vllm=False)
    with send_patches(str(tmp_path / "url")):
        trainer(url_of(server), server.folder / "model", tmp_path / "run")
        with pytest.raises(RuntimeError, match="a second trainer in this block"):
            trainer(url_of(server), server.folder / "model", tmp_path / "another run")
