"""Links between all members of a group: what a transport needs of them, and those of torch's process groups.

Those of loco's own are in `tcp`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Of a message that is never sent. gloo picks one of its devices by the tag's remainder: with this tag it is
# that of tag 0, which all other messages have, for up to ten devices.
_NEVER = 5040
GIVEN_UP = "these links were given up"

Messages = Sequence[tuple[int, Tensor]]  # with the member that each is for, or from


class Work(Protocol):
    """Messages on their way."""

    def wait(self, timeout: timedelta, /) -> object:
        """
        Raises:
            RuntimeError: they did not come in time, or never will.
        """
        ...


class Mesh(Protocol):
    """What a `Transport` needs of its links. Members are called 0 … size−1.

    Attributes:
        name: of these links, the same on all members, and no others'.
        device: where messages lie.
        takes_less: a message may be shorter than the room for it.
        needs_waiter: its waits end neither at once with `interrupt` nor with Ctrl-C, so another thread waits.
    """

    name: str
    device: torch.device
    takes_less: bool
    needs_waiter: bool

    def begin(self, sends: Messages, receives: Messages) -> Sequence[Work]:
        """Start to send and to receive -> one work for each message, the receives first; or one for all.

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
    """The members of one of torch's process groups.

    Args:
        device: where messages lie.
        owned: nobody else uses the group, so it is closed with this mesh, or when nobody holds this mesh.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, owned: bool) -> None:
        self.name: str = group.group_name
        self.device = device
        self.takes_less = self.needs_waiter = backends_of(group).get(device.type) == "gloo"
        self._group: dist.ProcessGroup | None = group
        self._peers = [peer for peer in range(group.size()) if peer != group.rank()]
        self._end = weakref.finalize(self, _destroy, group) if owned else None
        if self._end is not None:
            self._end.atexit = False  # torch ends what is left, in its own order

    def begin(self, sends: Messages, receives: Messages) -> Sequence[Work]:
        group = self._group
        if group is None:
            raise RuntimeError(GIVEN_UP)
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, t, group=group, group_peer=p) for p, t in receives]
            + [dist.P2POp(dist.isend, t, group=group, group_peer=p) for p, t in sends]
        )

    def interrupt(self) -> None:
        group = self._group
        if group is None:
            return
        if self.needs_waiter:
            _close_pairs(group, self._peers)
        else:
            with suppress(RuntimeError, ValueError):
                group.abort()

    def close(self) -> None:
        # gloo hangs up when nobody holds the group any more, or its messages.
        if self._end is not None:
            self.interrupt()
            self._group = None  # which for torch would be all groups
            self._end()


class Subset:
    """Some members of a mesh, called 0 … size−1 in this order.

    Args:
        members: by their numbers in the mesh.
        close: closes the whole mesh, and with it this one.
    """

    def __init__(self, mesh: Mesh, members: Sequence[int], *, close: Callable[[], object]) -> None:
        self.name, self.device = mesh.name, mesh.device
        self.takes_less, self.needs_waiter = mesh.takes_less, mesh.needs_waiter
        self._mesh = mesh
        self._members = list(members)
        self._close = close

    def begin(self, sends: Messages, receives: Messages) -> Sequence[Work]:
        at = self._members
        return self._mesh.begin([(at[p], t) for p, t in sends], [(at[p], t) for p, t in receives])

    def interrupt(self) -> None:
        self._mesh.interrupt()

    def close(self) -> None:
        self._close()


class NoLinks:
    """Those of a member that is alone."""

    name = ""
    device = torch.device("cpu")
    takes_less, needs_waiter = True, False
    is_open = False

    def begin(self, sends: Messages, receives: Messages) -> Sequence[Work]:
        raise RuntimeError("this site has no links")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, from e.g. "cpu:gloo,cuda:nccl"."""
    pairs = str(dist.get_backend_config(group)).split(",")
    return {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}


def any_device(group: dist.ProcessGroup) -> torch.device:
    """Some device whose memory the group can send."""
    return torch.device(next(iter(backends_of(group))))


def group_device(group: dist.ProcessGroup, device: torch.device) -> torch.device | None:
    """Where the messages of tensors on `device` lie if the group carries them. None: host memory, and
    connections of loco's own do it better than gloo."""
    backend = backends_of(group).get(device.type, "gloo")
    return None if device.type == "cpu" or backend == "gloo" else device


def _close_pairs(pairs: Any, peers: Iterable[int]) -> None:
    """gloo has no call that closes connections (its abort does nothing); a wait that times out closes all.

    A peer that has hung up already fails the call before it can time out: then another one's does it.
    """
    for peer in peers:
        with suppress(RuntimeError, ValueError):  # which is what it is for
            never = pairs.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER)
            never.wait(timedelta(milliseconds=1))


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError, RuntimeError):  # the world's groups were destroyed before
        dist.destroy_process_group(group)
