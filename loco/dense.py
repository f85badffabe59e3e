"""The dense exchange: each site sums one slice for all."""

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Encoded, Entries

from .codec import WholeFloat32
from .errors import WireError
from .exchange import Exchange, Problem, unreadable_problem
from .transport import as_bytes, to_bytes
from .wire import Header, Status

_DAMAGED = WireError("a body whose checksum does not match")


class DenseExchange(Exchange):
    """Each site sums one slice in site order, then the slices are gathered.

    Sends 2(R−1)/R · 4 bytes per element, as a ring all-reduce does, but the order of the sum, and so its
    bits, do not depend on a ring. Every slice travels with its digest.
    """

    def _payload(self, encoded: Encoded, round: int, numel: int) -> tuple[Header, Tensor]:
        codec = WholeFloat32()
        body = codec.encode(encoded.entries)
        header = Header(
            codec=codec.id,
            site=self.across.rank,
            round=round,
            numel=numel,
            entries=numel,
            body_bytes=body.numel(),
            digest=encoded.digest,
        )
        return header, body.to(self.across.device)

    def _room(self, headers: list[Header]) -> dict[int, Tensor]:
        """The peers' parts of this site's slice, and, under this site's own number, the whole sum."""
        across, numel = self.across, headers[self.across.rank].numel
        mine = self._slices(numel)[across.rank]
        width = mine.stop - mine.start
        return {
            site: torch.zeros(
                numel if site == across.rank else width, dtype=torch.float32, device=across.device
            )
            for site in range(across.size)
        }

    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor, room: dict[int, Tensor]
    ) -> tuple[list[Entries], Problem | None]:
        across, round = self.across, headers[self.across.rank].round
        values, total = body.view(torch.float32), room.pop(across.rank)
        slices = self._slices(values.numel())
        mine = slices[across.rank]
        # All four messages are exchanged whatever happens here in between: the peers wait for them.
        problems: list[Problem] = []

        outgoing = {peer: values[slices[peer]] for peer in across.peers}
        problems += self._swap_sealed(outgoing, room, round, "slices to their owners")
        try:
            for site in range(across.size):
                total[mine] += values[mine] if site == across.rank else room[site]
        except Exception as error:
            problems.append(Problem(Status.FAILED, seen=error))

        outgoing = dict.fromkeys(across.peers, total[mine])
        incoming = {peer: total[slices[peer]] for peer in across.peers}
        problems += self._swap_sealed(outgoing, incoming, round, "sums to all")
        return [Entries.whole(total.to(own.values.device))], next(iter(problems), None)

    def _slices(self, numel: int) -> list[slice]:
        size = self.across.size
        width = -(-numel // size)
        return [slice(min(k * width, numel), min((k + 1) * width, numel)) for k in range(size)]

    def _swap_sealed(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], round: int, what: str
    ) -> list[Problem]:
        """Move FP32 slices, and the digest of each after it -> what went wrong on the way."""
        across, phase = self.across, f"round {round}, {what}"
        across.swap(
            {peer: as_bytes(values) for peer, values in outgoing.items()},
            {peer: as_bytes(values) for peer, values in incoming.items()},
            phase=phase,
        )
        problems: list[Problem] = []
        seals = torch.zeros(2, across.size, 8, dtype=torch.uint8, device=across.device)
        ours, theirs = seals[0], seals[1]
        try:
            # A sum goes to all peers: one pass over it is enough.
            distinct = {id(values): values for values in outgoing.values()}
            sealed = {key: across.message(_seal(values)) for key, values in distinct.items()}
            for peer, values in outgoing.items():
                ours[peer] = sealed[id(values)]
        except Exception as error:
            problems.append(Problem(Status.FAILED, seen=error))
        across.swap(
            {peer: ours[peer] for peer in outgoing},
            {peer: theirs[peer] for peer in incoming},
            phase=f"{phase}, digests",
        )
        try:
            for peer, values in incoming.items():
                if to_bytes(theirs[peer]) != _seal(values):
                    problems.append(unreadable_problem(peer, _DAMAGED, round))
        except Exception as error:
            problems.append(Problem(Status.FAILED, seen=error))
        return problems


def _seal(values: Tensor) -> bytes:
    return kernels.digest(values).to_bytes(8, "little")
