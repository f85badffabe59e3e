"""The gather exchange: every payload to every site."""

import torch
from torch import Tensor

from loco.kernels import Entries

from .errors import WireError
from .exchange import Exchange, Problem, unreadable_problem
from .wire import Header, decode_payload


class GatherExchange(Exchange):
    """Each site's payload to all sites, in its own size. Sends (R−1) payloads."""

    def _room(self, headers: list[Header]) -> dict[int, Tensor]:
        across = self.across
        return {
            site: torch.empty(headers[site].body_bytes, dtype=torch.uint8, device=across.device)
            for site in across.peers
        }

    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor, room: dict[int, Tensor]
    ) -> tuple[list[Entries], Problem | None]:
        across, round = self.across, headers[self.across.rank].round
        across.swap(dict.fromkeys(across.peers, body), room, phase=f"round {round}, payloads")

        contributions: list[Entries] = []
        for site, header in enumerate(headers):
            if site == across.rank:
                contributions.append(own)
                continue
            try:
                entries = decode_payload(header, room.pop(site).to(own.values.device))
            except WireError as error:
                return [], unreadable_problem(site, error, round)
            contributions.append(entries)
        return contributions, None
