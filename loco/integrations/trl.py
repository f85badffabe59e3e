"""TRL's trainers publish what changed in their weights, and tell a vLLM server to take it.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "loco"}' \\
        --logprobs-mode processed_logprobs --max-logprobs -1

    with send_patches("shared/weights"):
        trainer = GRPOTrainer(model, rewards, GRPOConfig(use_vllm=True, vllm_mode="server"), …)
    trainer.train()

AsyncGRPOTrainer takes it as an argument: `weight_transfer=WeightTransfer("shared/weights")`.

Between the two there is HTTP alone, and both reach the store of the versions: no NCCL group is made.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate import PartialState
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from loco.sync import Published, SyncError
from loco.sync.streamed import StreamedPublisher

HOW_TO_SERVE = """VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "loco"}'"""


class WeightTransfer:
    """Publishes a trainer's weights, and has a vLLM server write them: `AsyncGRPOTrainer(weight_transfer=…)`.

    Each `send_weights` is a version. The server goes on generating while what changed is found, published and
    fetched; only while it is written requests wait. If the server can't take a version it keeps the weights
    that it had, and `send_weights` raises, which ends the training.

    The main process copies the weights to host memory, in the dtype of the server's, beside the publisher's
    own copy. Their names must be those of the server's checkpoint.

    Args:
        url: where the versions go, as of `loco.sync.Publisher`. A new training takes a new folder.
        server: the vLLM server's address.
        read_url: where the server reads the versions, if not at `url`; as the address of
            `python -m loco sync serve`. A path must lead there on the server's machine.
        key_file: a file with the key that seals the versions, on this machine and on the server's.
        timeout: seconds that the server may take for each call.
        options: as of `loco.sync.Publisher`.

    Attributes:
        published: the report of the last version.
    """

    def __init__(
        self,
        url: str,
        *,
        server: str = "http://localhost:8000",
        read_url: str | None = None,
        key_file: str | None = None,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        self.url, self.server = url, server.rstrip("/")
        self.published: Published | None = None
        self._init_info = {
            "url": _absolute(read_url or url),
            "key_file": key_file,
            "training": options.get("training"),
        }
        self._options: dict[str, Any] = options | {"key": Path(key_file).read_bytes() if key_file else None}
        self._timeout = timeout
        self._publisher: StreamedPublisher | None = None

    def init_weight_transfer(self) -> None:
        """Make the server follow what is published.

        Raises:
            SyncError: it is not served as it must be, or the engine can't take weights; says why.
        """
        info = self._call("/server_info?config_format=json", method="GET")["vllm_config"]
        backend = (info["weight_transfer_config"] or {}).get("backend")
        if backend != "loco":
            raise SyncError(
                f"{self.server} has the weight transfer backend {backend!r}, not 'loco': "
                f"start the vLLM server by {HOW_TO_SERVE}"
            )
        dtype = info["model_config"]["dtype"].removeprefix("torch.")
        self._options.setdefault("dtype", getattr(torch, dtype))
        self._call("/init_weight_transfer_engine", {"init_info": self._init_info})

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish these tensors, all that the server's checkpoint has, and have the server take them.

        Raises:
            SyncError: the server can't take them; it goes on with the weights that it had.
            LocoError, OSError: they can't be published, as of `Publisher.publish`.
        """
        if self._publisher is None:
            self._publisher = StreamedPublisher(self.url, **self._options)
        for name, tensor in iterator:
            self._publisher.take(name, tensor)
        self.published = self._publisher.publish()
        version = self.published.version
        try:
            self._update(version)
        except SyncError as error:
            told = f"the server, which reads {self._init_info['url']}, did not take version {version}"
            raise SyncError(f"{told}: {error}") from error

    def pause(self) -> None:
        """The server waits only while `send_weights` has it write."""

    def resume(self) -> None:
        """`send_weights` has done that."""

    def destroy(self) -> None:
        """Let go of the copies of the weights."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def _update(self, version: int) -> None:
        try:
            self._call("/start_weight_update")
            self._call("/pause?mode=keep")
            self._call("/update_weights", {"update_info": {"version": version}})
            self._call("/finish_weight_update", {"weight_version": str(version)})
        except BaseException:
            with suppress(SyncError):  # it has ended already, unless this was interrupted
                self._call("/finish_weight_update")
            raise
        finally:
            self._call("/resume")

    def _call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        try:
            answer = requests.request(method, self.server + path, json=body, timeout=self._timeout)
        except requests.RequestException as error:
            raise SyncError(f"the vLLM server at {self.server} does not answer {path}: {error}") from error
        if answer.status_code == 404:
            raise SyncError(f"there is no {self.server}{path}: start the vLLM server by {HOW_TO_SERVE}")
        if answer.status_code != 200:
            raise SyncError(f"the vLLM server at {self.server} failed at {path}: {answer.text}")
        return answer.json() if answer.content else None


class PatchClient(VLLMClient):
    """TRL's client of a vLLM server, but for the weights: a `WeightTransfer` sends them."""

    def __init__(self, transfer: WeightTransfer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transfer, transfer.server = transfer, self.base_url

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        self.transfer.init_weight_transfer()

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        self.transfer.send_weights(named_params)

    def update_named_param(self, name: str, weights: Tensor) -> None:
        raise NotImplementedError("a version is all weights: call update_named_params or update_model_params")

    def close_communicator(self) -> None:
        self.transfer.destroy()


@contextmanager
def send_patches(url: str, **options: Any) -> Iterator[WeightTransfer]:
    """The trainer of TRL's that is made in this block, with `vllm_mode="server"`, sends what changed.

    It is one that generates through TRL's `VLLMGeneration`, as GRPOTrainer and RLOOTrainer do.

    Args:
        url, options: as of `WeightTransfer`. TRL's configuration has the server's address.

    Raises:
        RuntimeError: not one such trainer was made in the block.
    """
    made: list[PatchClient] = []
    transfer = WeightTransfer(url, **options)

    def client(*args: Any, **kwargs: Any) -> PatchClient:
        if made:
            raise RuntimeError("a second trainer in this block: it wants a block, and a folder, of its own")
        made.append(PatchClient(transfer, *args, **kwargs))
        return made[0]

    generation: Any = vllm_generation
    theirs, generation.VLLMClient = generation.VLLMClient, client  # TRL has no argument for it
    try:
        yield transfer
    finally:
        generation.VLLMClient = theirs
    if not made and PartialState().is_main_process:
        raise RuntimeError(
            "no trainer in this block has a client of a vLLM server: make it here, with use_vllm=True and "
            'vllm_mode="server"'
        )


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).absolute())
