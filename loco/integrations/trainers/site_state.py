"""The rounds of a whole site in one object, for frameworks of which one rank writes a checkpoint for all."""

import io
from typing import Any

import torch
import torch.distributed as dist

import loco


class SiteState:
    """Stateful, in torch's sense: every rank of the site calls `state_dict` and `load_state_dict`.

    Rank 0's state dict has the rounds of all ranks; the others' are empty.
    """

    def __init__(self, handle: loco.Attached) -> None:
        self._handle = handle
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        # Not the framework's group: with NCCL this would go through the memory of the GPUs.
        self._group: Any = dist.new_group(backend="gloo") if self._size > 1 else None

    def state_dict(self) -> dict[str, Any]:
        own = self._handle.state_dict()["loco"]
        if self._size == 1:
            return {"ranks": [own]}
        rank = dist.get_rank()
        if rank:
            own = {**own, "weights": None}  # a site's ranks have the same
        ranks = self._gather(own)
        return {"ranks": ranks} if ranks else {}

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' on rank 0, nothing on the others; as bytes that hold data only, never code."""
        file = io.BytesIO()
        torch.save(own, file)
        mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self._group)
        padded = mine.new_zeros(int(max(sizes)))
        padded[: mine.numel()] = mine
        room = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
        dist.gather(padded, room, dst=0, group=self._group)
        return [
            torch.load(io.BytesIO(whole[: int(size)].numpy().tobytes()), weights_only=True)
            for whole, size in zip(room or [], sizes, strict=False)
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the model and the optimizer first.

        Raises:
            ValueError: it was saved by a site of another size.
        """
        ranks = state_dict["ranks"]
        if len(ranks) != self._size:
            raise ValueError(f"this state is of a site of {len(ranks)} ranks, this one has {self._size}")
        own = ranks[dist.get_rank() if self._size > 1 else 0]
        own = {**own, "weights": ranks[0]["weights"]}
        self._handle.load_state_dict({**self._handle.inner.state_dict(), "loco": own})
