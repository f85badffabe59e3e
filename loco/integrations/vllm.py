"""Changed weights, written in place into a running vLLM: the weight transfer backend "loco".

The package registers itself in every process of vLLM, so that the backend only has to be named:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "loco"}'

    POST /init_weight_transfer_engine  {"init_info": {"url": "…"}}          where the trainer publishes

    POST /start_weight_update                                               begins to fetch the newest version
    POST /update_weights               {"update_info": {"version": 7}}      writes it between two steps
    POST /finish_weight_update         {"weight_version": "7"}
    POST /reset_prefix_cache                                                which is of the old weights

LoRA adapters can have publishers of their own, in an engine with enable_lora:

    POST /init_weight_transfer_engine  {"init_info": {"adapters": {"1": {"url": "…", "folder": "…"}}}}

where 1 is the `lora_int_id` of its requests, and `folder` what they name as its path. All adapters and the
weights change between the same two steps.

`vllm.LLM` and `AsyncLLM` have methods of the same names. Requests in flight go on, from keys and values that
the old weights made. Between `/pause?mode=keep` and `/resume` they wait, and vLLM makes these anew, and
forgets its prefix cache, too: the last call is not needed then.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from loco.sync import Prepared, Subscriber
from loco.sync.weights.memory import Target

from .engines.vllm_adapters import Adapter, Loaded
from .engines.vllm_ranks import from_all_ranks, last_rank_raises, on_all_ranks
from .engines.vllm_source import check_source
from .engines.vllm_weights import Weights, checkpoint_of, layers_that_compute, weights_of

logger = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known; vLLM calls this in each of its processes (`vllm.general_plugins`)."""
    if "loco" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("loco", LocoWeightTransfer)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes.

    Attributes:
        url: where the trainer publishes its weights; LOCO_SYNC_URL, if it is set, or below that. "": they
            stay.
        key_file: a file with the publishers' key, on the machine of each worker; no secret is sent by HTTP.
        training: the publishers' name for it, if it has one.
        adapters: by the `lora_int_id` of their requests, the `url` and the `folder` of each.
    """

    url: str = ""
    key_file: str | None = None
    training: str | None = None
    adapters: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes: versions of the weights and of adapters, by default the newest of each."""

    version: int | None = None
    adapters: dict[str, int] = field(default_factory=dict)


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
        self._computing: list[MLAAttention] = []  # layers that keep something that they compute from these
        self._followers: dict[str, Subscriber | Adapter] = {}  # of the weights, by "", and of adapters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loco-fetch")
        self._fetching: dict[str, Future[Prepared | Loaded]] = {}

    @last_rank_raises
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learn where the weights are, the first time; then begin to follow a publisher."""

        def begin() -> None:
            self.shutdown()
            self._follow(init_info)

        try:
            on_all_ranks(begin)
        except Exception:
            self.shutdown()
            raise

    @last_rank_raises
    def start_weight_update(self) -> None:
        self._require_followers()
        self._fetching = {
            name: self._thread.submit(follower.prepare) for name, follower in self._followers.items()
        }

    @last_rank_raises
    def update_weights(self, update_info: dict[str, int | None]) -> None:
        self.receive_weights(on_all_ranks(lambda: self.parse_update_info(update_info)))
        if self.device.type != "cpu":  # as the base class does, which needs an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        asked = on_all_ranks(lambda: self._asked(update_info))
        prepared = {name: self._prepared(name, version) for name, version in asked.items()}
        before = {name: follower.version for name, follower in self._followers.items()}

        def apply() -> None:
            try:
                for name, one in prepared.items():
                    self._followers[name].apply(one)  # type: ignore[arg-type]
                self._compute_again()
            except BaseException:
                self._take_back(before)
                raise

        try:
            on_all_ranks(apply)
        except Exception:  # not Ctrl-C: the other ranks may have heard that this one is done
            self._take_back(before)
            raise

    def _take_back(self, before: Mapping[str, int | None]) -> None:
        """All followers, to these versions."""
        for name, follower in self._followers.items():
            if follower.version != before[name]:
                try:
                    follower.rollback()
                except Exception:
                    what = f"adapter {name}" if name else "the weights"
                    logger.exception("%s stay version %s", what, follower.version)
                except KeyboardInterrupt:  # which has waited for all of it; an error is raised anyway
                    logger.info("interrupted while an update was taken back")
        self._compute_again()

    def _compute_again(self) -> None:
        """What layers keep of the weights."""
        for layer in self._computing:
            layer.process_weights_after_loading(self.vllm_config.model_config.dtype)

    def _asked(self, update_info: UpdateInfo) -> dict[str, int | None]:
        """The version of each follower."""
        self._require_followers()
        asked = {str(number): version for number, version in update_info.adapters.items()}
        if update_info.version is not None:
            asked[""] = update_info.version
        if unknown := asked.keys() - self._followers.keys():
            what = [f"adapter {name}" if name else "the weights" for name in sorted(unknown)]
            raise ValueError(f"init_weight_transfer_engine named no publisher of {', '.join(what)}")
        return {name: asked.get(name) for name in self._followers}

    def _prepared(self, name: str, version: int | None) -> Prepared | Loaded:
        """The same version on all ranks."""
        found = on_all_ranks(lambda: self._fetch(name, version))
        # Asked for the newest, ranks may have found different ones: the first rank's counts.
        first = from_all_ranks(found.version)[0]
        return on_all_ranks(lambda: found if found.version == first else self._fetch(name, first))

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the weights are in place."""

    def shutdown(self) -> None:
        """Stop following; another `init_weight_transfer_engine` may come."""
        fetching, followers = self._fetching.values(), self._followers
        self._fetching, self._followers = {}, {}
        for one in fetching:
            one.cancel()
        wait(fetching)  # for what had begun
        for follower in followers.values():
            if isinstance(follower, Adapter):
                follower.leave()

    def _follow(self, init_info: InitInfo) -> None:
        if not (init_info.url or init_info.adapters):
            raise ValueError("init_info must name the url of the weights' publisher, or adapters, or both")
        key = Path(init_info.key_file).read_bytes() if init_info.key_file else None

        def subscriber(target: Target, url: str, loaded: Mapping[str, Tensor] | None = None) -> Subscriber:
            url = check_source(url, os.environ)
            return Subscriber(target, url, training=init_info.training, key=key, loaded=loaded)

        # Adapters first: what they change can always be taken back.
        for name, one in init_info.adapters.items():
            if not re.fullmatch("[1-9][0-9]*", name):
                raise ValueError(f"an adapter is named by the lora_int_id of its requests, got {name!r}")
            if one.keys() != {"url", "folder"}:
                raise ValueError(
                    f"adapter {name} needs a url and a folder, got {', '.join(one) or 'nothing'}"
                )
            self._followers[name] = Adapter(
                self.model,
                self.vllm_config,
                int(name),
                Path(one["folder"]),
                partial(subscriber, url=one["url"]),
            )
        if init_info.url:
            self._followers[""] = self._of_weights(partial(subscriber, url=init_info.url))

    def _of_weights(self, subscriber: Callable[..., Subscriber]) -> Subscriber:
        if self._weights is None:
            self._weights = weights_of(self.model, self.vllm_config)
            self._computing = layers_that_compute(self.model)
        # Of tensors that the ranks have divided each must know the whole: at first, what it has loaded.
        divided = any(isinstance(one, list) for one in self._weights.values())
        loaded = checkpoint_of(self.vllm_config) if divided else None
        follower = subscriber(self._weights, loaded=loaded)
        follower.check()
        return follower

    @property
    def subscriber(self) -> Subscriber:
        """To the weights."""
        self._require_followers()
        follower = self._followers[""]
        assert isinstance(follower, Subscriber)
        return follower

    def _require_followers(self) -> None:
        if not self._followers:
            raise RuntimeError("call init_weight_transfer_engine first: nobody is followed")

    def _fetch(self, name: str, version: int | None) -> Prepared | Loaded:
        """What `start_weight_update` has begun to fetch, if it is this version."""
        fetching = self._fetching.get(name)
        if fetching is not None:
            wait([fetching])  # also where this is interrupted nothing else is prepared beside it
            del self._fetching[name]
            if version is None or fetching.exception() is None:
                prepared = fetching.result()
                if version in (None, prepared.version):
                    return prepared
        return self._followers[name].prepare(version)
