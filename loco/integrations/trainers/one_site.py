"""What all frameworks need: their world is one site, and their loggers are told of its rounds."""

import logging
import socket
import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

import loco
from loco.members.sites import are_named_by_variables

_logger = logging.getLogger(__name__)


def topology_of_one_world(topology: loco.SiteTopology | None) -> loco.SiteTopology:
    """`topology`, or by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT. If none of
    them is set this world is the only site, which a warning says.

    Raises:
        ValueError: torch's world holds several sites.
    """
    if topology is None:
        topology = loco.Sites() if are_named_by_variables() else _the_only_site()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != topology.ranks_per_site:
        raise ValueError(
            f"torch's world has {world} ranks, a site of this topology has {topology.ranks_per_site}, and "
            f"the framework averages gradients over the whole world at every step: start every site as a "
            f"world of its own (its own torchrun or accelerate launch), and use topology=loco.Sites(…)"
        )
    return topology


def _the_only_site() -> loco.SiteTopology:
    """For a script that is tried on one machine first."""
    _logger.warning(
        "LOCO_SITES, LOCO_SITE and LOCO_AT are not set: this is a run of one site, for a try. Its rounds "
        "exchange nothing. Set them on every site: docs/sites.md"
    )
    if dist.is_initialized():
        return loco.Topology(ranks_per_site=dist.get_world_size())
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    return loco.Sites(1, site="alone", at=f"127.0.0.1:{port}")


def steps_of_the_run(handle: loco.Attached) -> int:
    """The step at which this site is by the rounds of the run, which the others have gone on with while it
    was away. 0 where sites do not come and go."""
    if not handle.topology.is_elastic:
        return 0
    return handle.round * handle.sync_every + handle.local_step


def advance(scheduler: LRScheduler, steps: int) -> None:
    """Bring a schedule of the learning rate to so many steps."""
    scheduler.last_epoch = steps - 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before a step: it is meant
        scheduler.step()


def log_rounds(handle: loco.Attached, log: Callable[[dict[str, float], int], object]) -> None:
    """Have `log(metrics, step)` called after each round."""

    def tell(_: loco.SyncReport) -> None:
        log(handle.metrics(), handle.round * handle.sync_every)

    handle.register_report_hook(tell)
