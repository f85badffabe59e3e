"""What a site says of itself, and what is wrong with it, or does not fit the other sites."""

import os
import platform
import socket
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from loco import kernels

from ...version import VERSION
from ...wire import records

CLOCK_LIMIT = 1.0  # seconds; NTP keeps clocks within a few hundredths


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one site, as it tells the others. One of another version may tell less, or more.

    address: by which the others reach it.
    kernels: what computes rounds on its device.
    problems: sentences, each with what to do.
    """

    name: str = "?"
    host: str = "?"
    address: str = "?"
    loco: str = "?"
    wire: int = 0
    python: str = "?"
    torch: str = "?"
    triton: str = "?"
    kernels: str = "?"
    gpus: tuple[str, ...] = ()
    cores: int = 0
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Facts":
        """What another site has told."""
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in told.items() if name in known}
        for name in ("gpus", "problems"):
            found[name] = tuple(found.get(name, ()))
        return cls(**found)


def own_facts(name: str) -> Facts:
    """This site's. Its kernels are compiled now, if they have not been."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        homes = {kind: kernels.home(kind) for kind in dict.fromkeys((device, "cpu"))}
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    compiled = "Triton" if device == "cuda" else "C"
    return Facts(
        name=name,
        host=socket.gethostname(),
        loco=VERSION,
        wire=records.VERSION,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton,
        kernels="plain torch" if homes[device] is kernels.reference else compiled,
        gpus=tuple(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())),
        cores=len(os.sched_getaffinity(0)),
        problems=tuple(f"{name}: {str(one.message).removeprefix('loco: ')}" for one in warned),
    )


def version_problems(sites: Sequence[Facts]) -> list[str]:
    """Sites whose versions differ do not train together, or nobody has tried it."""
    found: list[str] = []
    for what, field in (("versions of loco", "loco"), ("versions of the wire format", "wire")):
        values = {one.name: getattr(one, field) for one in sites}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} on {name}" for name, value in values.items())
            found.append(f"the sites have different {what} ({listed}): install the same loco on all")
    return found


def clock_offsets(pairs: Mapping[tuple[int, int], float], sites: int) -> list[float]:
    """How far each site's clock is ahead of most.

    Args:
        pairs: for (0, k), how far site k's clock is ahead of site 0's.
    """
    ahead = [0.0, *(pairs[0, site] for site in range(1, sites))]
    usual = statistics.median_low(ahead)
    return [clock - usual for clock in ahead]


def clock_problems(names: Sequence[str], offsets: Sequence[float]) -> list[str]:
    why = (
        "let NTP set it. Rounds do not depend on clocks, but logs are read by them, and TLS certificates and "
        "the signatures of object stores expire by them"
    )
    wrong = [(name, offset) for name, offset in zip(names, offsets, strict=True) if abs(offset) > CLOCK_LIMIT]
    if wrong and len(names) == 2:  # nobody can tell which of them it is
        return [f"the clocks of {' and '.join(names)} are {abs(wrong[0][1]):,.1f} s apart: {why}"]
    return [
        f"the clock of {name} is {abs(offset):,.1f} s {'ahead of' if offset > 0 else 'behind'} most: {why}"
        for name, offset in wrong
    ]
