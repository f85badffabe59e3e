"""Changed weights, written in place into a running vLLM: the weight transfer backend "loco".

The package registers itself in every process of vLLM, so that the backend only has to be named:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "loco"}'

    POST /init_weight_transfer_engine  {"init_info": {"url": "…"}}          where the trainer publishes

    POST /start_weight_update                                               begins to fetch the newest version
    POST /update_weights               {"update_info": {"version": 7}}      writes it between two steps
    POST /finish_weight_update         {"weight_version": "7"}
    POST /reset_prefix_cache                                                which is of the old weights

`vllm.LLM` and `AsyncLLM` have methods of the same names. Requests in flight go on, from keys and values that
the old weights made. Between `/pause?mode=keep` and `/resume` they wait, and vLLM makes these anew, and
forgets its prefix cache, too: the last call is not needed then.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from loco import PeerError
from loco.sync import Prepared, Subscriber

from .engines.vllm_ranks import from_all_ranks, last_rank_raises, on_all_ranks
from .engines.vllm_source import check_source
from .engines.vllm_weights import Weights, checkpoint_of, weights_of


def register() -> None:
    """Make the backend known; vLLM calls this in each of its processes (`vllm.general_plugins`)."""
    if "loco" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("loco", LocoWeightTransfer)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes.

    Attributes:
        url: where the trainer publishes its weights; LOCO_SYNC_URL, if it is set, or below that.
        key_file: a file with the publisher's key, on the machine of each worker; no secret is sent by HTTP.
        training: the publisher's name for it, if it has one.
    """

    url: str
    key_file: str | None = None
    training: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes: a version, by default the newest."""

    version: int | None = None


class LocoWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker's side: all ranks of an engine change to the same version between the same two steps, or none.

    `start_weight_update` returns at once, and the newest version is fetched and decoded while the engine
    generates. `update_weights` waits for it, if need be, and writes the changed elements, which is all that
    holds the engine up. If it fails the engine goes on with the weights that it had; call
    `finish_weight_update` then, too, and begin anew. Only the worker of the last rank knows of a failure.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._weights: Weights | None = None
        self._subscriber: Subscriber | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loco-fetch")
        self._fetching: Future[Prepared] | None = None

    @last_rank_raises
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn where the weights are, the first time; then begin to follow a publisher."""
        self.shutdown()
        on_all_ranks(lambda: self._follow(init_info))

    @last_rank_raises
    def start_weight_update(self) -> None:
        self._fetching = self._thread.submit(self.subscriber.prepare)

    @last_rank_raises
    def update_weights(self, update_info: dict[str, int | None]) -> None:
        self.receive_weights(on_all_ranks(lambda: self.parse_update_info(update_info)))
        if self.device.type != "cpu":  # as the base class does, which needs an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        found = on_all_ranks(lambda: self._fetch(update_info.version))
        # Asked for the newest, ranks may have found different ones: the first rank's counts.
        version = from_all_ranks(found.version)[0]
        prepared = on_all_ranks(lambda: found if found.version == version else self._fetch(version))
        try:
            on_all_ranks(lambda: self.subscriber.apply(prepared))
        except PeerError:
            self.subscriber.rollback()
            raise

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the weights are in place."""

    def shutdown(self) -> None:
        """Stop following; another `init_weight_transfer_engine` may come."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._fetching = self._subscriber = None

    def _follow(self, init_info: InitInfo) -> None:
        url = check_source(init_info.url, os.environ)
        key = Path(init_info.key_file).read_bytes() if init_info.key_file else None
        if self._weights is None:
            self._weights = weights_of(self.model, self.vllm_config)
        # Of tensors that the ranks have divided each must know the whole: at first, what it has loaded.
        divided = any(isinstance(one, list) for one in self._weights.values())
        loaded = checkpoint_of(self.vllm_config) if divided else None
        subscriber = Subscriber(self._weights, url, training=init_info.training, key=key, loaded=loaded)
        subscriber.check()
        self._subscriber = subscriber

    @property
    def subscriber(self) -> Subscriber:
        if self._subscriber is None:
            raise RuntimeError("call init_weight_transfer_engine first: nobody is followed")
        return self._subscriber

    def _fetch(self, version: int | None) -> Prepared:
        """What `start_weight_update` has begun to fetch, if it is this version."""
        fetching, self._fetching = self._fetching, None
        if fetching is not None and (version is None or fetching.exception() is None):
            prepared = fetching.result()
            if version in (None, prepared.version):
                return prepared
        return self.subscriber.prepare(version)
