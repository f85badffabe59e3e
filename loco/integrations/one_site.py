"""A framework's world must be one site."""

import torch.distributed as dist

import loco


def topology_of_one_world(topology: loco.SiteTopology | None) -> loco.SiteTopology:
    """`topology`, or by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT.

    Raises:
        ValueError: torch's world holds several sites.
    """
    topology = topology or loco.Sites()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != topology.ranks_per_site:
        raise ValueError(
            f"torch's world has {world} ranks, a site of this topology has {topology.ranks_per_site}, and "
            f"the framework averages gradients over the whole world at every step: start every site as a "
            f"world of its own (its own torchrun or accelerate launch), and use topology=loco.Sites(…)"
        )
    return topology
