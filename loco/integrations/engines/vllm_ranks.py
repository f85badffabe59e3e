"""What the ranks of one vLLM engine do together: all of them, or none."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

from loco import PeerError

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def on_all_ranks(step: Callable[[], _Result]) -> _Result:
    """Do a step on all ranks; where it fails on one, it fails on all.

    Raises:
        PeerError: it failed on another rank.
    """
    try:
        result = step()
    except BaseException:
        from_all_ranks(0)
        raise
    if not all(from_all_ranks(1)):
        raise PeerError("this failed on another rank of the engine: the log of its worker says why")
    return result


def from_all_ranks(value: int) -> list[int]:
    """The value of each rank of this engine, which is a product of groups. Its replicas are other engines."""
    values = torch.tensor([value])
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        if group.world_size == 1:
            continue  # gloo asks even itself, which takes milliseconds on a busy machine
        parts = [torch.empty_like(values) for _ in range(group.world_size)]
        dist.all_gather(parts, values, group=group.cpu_group)
        values = torch.cat(parts)
    return values.tolist()


def last_rank_raises(call: Callable[..., None]) -> Callable[..., None]:
    """For a method of a weight transfer engine that fails on all ranks or on none: the last rank reports it.

    vLLM 0.32 reads the ranks' answers in order up to the first failure, and what it hasn't read it takes for
    the answer to the next call (vllm-project/vllm#49972). After the last rank's nothing is left to read.
    """

    @functools.wraps(call)
    def reported(engine: Any, *args: Any) -> None:
        try:
            call(engine, *args)
        except Exception:
            if engine.parallel_config.rank == engine.parallel_config.world_size - 1:
                raise
            logger.exception("%s failed", call.__name__)

    return reported
