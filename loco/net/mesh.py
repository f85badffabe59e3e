"""Links between all members of a group: what a transport needs of them, and those of torch's process groups.

Those of loco's own are in `tcp`.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

GIVEN_UP = "these links were given up"


class Parcel(NamedTuple):
    """Bytes to send to a member, or room for those that it sends.

    data: uint8, contiguous. seal: sent, or received, behind them.
    """

    member: int
    data: Tensor
    seal: Tensor | None = None


Parcels = Sequence[Parcel]


class Work(Protocol):
    """A message on its way.

    Attributes:
        size: bytes of it, known once it has come.
        is_shared: with other messages, so that its failure does not say which of them failed.
    """

    size: int
    is_shared: bool

    def wait(self, timeout: timedelta, /) -> object:
        """
        Raises:
            RuntimeError: it did not come in time, or never will.
        """
        ...


class Mesh(Protocol):
    """What a `Transport` needs of its links. Members are called 0 … size−1.

    Attributes:
        name: of these links, the same on all members, and no others'.
        device: where messages lie.
        takes_seals: parcels may have seals, and may be shorter than the room for them.
    """

    name: str
    device: torch.device
    takes_seals: bool

    def begin(self, sends: Parcels, receives: Parcels) -> Sequence[Work]:
        """Start to send and to receive -> one work for each parcel, the receives first.

        Raises:
            RuntimeError: a member has hung up, or these links are closed.
        """
        ...

    def interrupt(self) -> None:
        """Close all connections, and so end all waits for messages; from any thread."""
        ...

    def close(self) -> None:
        """Hang up, so that members that wait learn of it. A second time it does nothing."""
        ...


class GroupMesh:
    """The members of one of torch's process groups, which nobody else uses: it is closed with this mesh, or
    when nobody holds this mesh.

    Args:
        device: where messages lie.
    """

    takes_seals = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name: str = group.group_name
        self.device = device
        self._group: dist.ProcessGroup | None = group
        self._end = weakref.finalize(self, _destroy, group)
        self._end.atexit = False  # torch ends what is left, in its own order

    def begin(self, sends: Parcels, receives: Parcels) -> Sequence[Work]:
        group = self._group
        if group is None:
            raise RuntimeError(GIVEN_UP)
        operations = [
            dist.P2POp(dist.irecv, one.data, group=group, group_peer=one.member) for one in receives
        ]
        operations += [dist.P2POp(dist.isend, one.data, group=group, group_peer=one.member) for one in sends]
        works = dist.batch_isend_irecv(operations)
        # NCCL returns one work for all of them.
        is_shared = len(works) < len(operations)
        each = works * len(operations) if is_shared else works
        return [
            _GroupWork(work, one.data.numel(), is_shared)
            for work, one in zip(each, [*receives, *sends], strict=True)
        ]

    def interrupt(self) -> None:
        if self._group is not None:
            with suppress(RuntimeError, ValueError):
                self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self.interrupt()
            self._group = None  # which for torch would be all groups
            self._end()


class _GroupWork:
    def __init__(self, work: Any, size: int, is_shared: bool) -> None:
        self._work = work
        self.size = size
        self.is_shared = is_shared

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)


class Subset:
    """Some members of a mesh, called 0 … size−1 in this order.

    Args:
        members: by their numbers in the mesh.
        close: closes the whole mesh, and with it this one.
    """

    def __init__(self, mesh: Mesh, members: Sequence[int], *, close: Callable[[], object]) -> None:
        self.name, self.device, self.takes_seals = mesh.name, mesh.device, mesh.takes_seals
        self._mesh = mesh
        self._members = list(members)
        self._close = close

    def begin(self, sends: Parcels, receives: Parcels) -> Sequence[Work]:
        return self._mesh.begin(self._numbered(sends), self._numbered(receives))

    def _numbered(self, parcels: Parcels) -> list[Parcel]:
        return [one._replace(member=self._members[one.member]) for one in parcels]

    def interrupt(self) -> None:
        self._mesh.interrupt()

    def close(self) -> None:
        self._close()


class NoLinks:
    """Those of a member that is alone."""

    name = ""
    device = torch.device("cpu")
    takes_seals = True
    is_open = False

    def begin(self, sends: Parcels, receives: Parcels) -> Sequence[Work]:
        raise RuntimeError("this site has no links")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def group_device(group: dist.ProcessGroup, device: torch.device) -> torch.device | None:
    """Where the messages of tensors on `device` lie if the group carries them. None: host memory, and
    connections of loco's own do it better than gloo."""
    # By device type, e.g. "cpu:gloo,cuda:nccl".
    pairs = str(dist.get_backend_config(group)).split(",")
    backends = {type: backend for type, _, backend in (pair.partition(":") for pair in pairs)}
    return None if device.type == "cpu" or backends.get(device.type, "gloo") == "gloo" else device


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError, RuntimeError):  # the world's groups were destroyed before
        dist.destroy_process_group(group)
