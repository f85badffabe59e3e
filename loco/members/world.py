"""Views of a fixed world: always all its ranks. If links break, the next view has new ones."""

import uuid
from contextlib import suppress

import torch

from ..coordination.rendezvous import Reconnects
from ..errors import TransportError
from .fixed import FixedSites
from .repeats import Repeats
from .view import Standing, View


class WorldMembership:
    """The views of one optimizer over a `Topology`.

    Args:
        device: where the optimizer's state lives.
    """

    others_may_be_ahead = False

    def __init__(self, topology: FixedSites, device: torch.device) -> None:
        self._topology = topology
        self._device = device
        # A name that all ranks share and no other optimizer has, to meet under after a failure.
        record = topology.all_ranks().swap_records(uuid.uuid4().bytes, phase="naming")[0]
        self._name = record.hex()
        self._view: View | None = None
        self._has_connected = False
        self._given_up = ""  # the meeting to which this rank has said that it does not come

    def form(self, standing: Standing) -> View:
        return self.form_site()

    def form_site(self) -> View:
        """
        Raises:
            TransportError: a rank is dead, or not all came to connect anew.
        """
        if self._view is None or not self._view.is_whole:
            self._view = self._connect()
        return self._view

    def give_up(self, why: str) -> None:
        view = self._view
        if view is None or not view.is_whole:
            return
        view.is_whole = False
        if why:
            view.liveness.leave(why, view.across.link)
        self._topology.disconnect(view.across, view.inside)

    def attempts(self) -> Repeats:
        return Repeats(self._topology.repeats, stop=lambda error: self.stop(str(error)))

    def stop(self, why: str) -> None:
        self.give_up(why)
        self._given_up = self._next_meeting()
        self._topology.liveness.leave(why, self._given_up)

    def _next_meeting(self) -> str:
        return f"{self._name}/meeting {self._topology.rendezvous.barrier.next_meeting(self._name)}"

    def _meet(self) -> int:
        meeting = self._next_meeting()
        if meeting == self._given_up:
            meeting = ""  # others may have given up that one, too, and come back later than this rank
            with suppress(RuntimeError):
                self._topology.liveness.take_back(self._given_up)
        return self._topology.rendezvous.barrier.meet(self._name, meeting)

    def reconnects_by(self, user: Reconnects) -> None:
        """With one rank per site, intact links never need rebuilding for others."""
        if self._topology.ranks_per_site > 1:
            self._topology.rendezvous.answers(user, self._name)

    def _connect(self) -> View:
        if not self._has_connected:
            self._has_connected = True
            return self._connect_first()
        self._topology.liveness.say("reconnecting")  # it has left nothing that the others wait for now
        return self._connect_as(f"{self._name}/{self._meet() + 1}")

    def _connect_first(self) -> View:
        """All ranks are here and do the same, so a word of each tells whether to try again."""
        attempts, number = self.attempts(), 0
        while True:
            view, failure = None, TransportError("connecting: another rank could not connect")
            try:
                view = self._connect_as(f"{self._name}/first {number}")
            except TransportError as error:
                if error.lasting:
                    raise
                failure = error
            told = self._topology.all_ranks().swap_records(
                bytes([view is not None]), phase="connecting", limit=self._topology.patience
            )
            if view is not None and all(record == b"\1" for record in told):
                return view
            if view is not None:
                self._topology.disconnect(view.across, view.inside)
            attempts.failed(failure, linked=False, refused=False, own_fault=False)
            self._topology.liveness.say("connecting once more")
            number += 1

    def _connect_as(self, name: str) -> View:
        topology = self._topology
        try:
            across, inside = topology.connect(self._device, name)
            return View(
                name=name,
                site=topology.site,
                num_sites=topology.num_sites,
                across=across,
                inside=inside,
                liveness=topology.liveness,
                verdicts=topology.verdicts(f"loco/{name}"),
            )
        except BaseException as error:  # Ctrl-C, too: others may have their links, and wait on them
            topology.liveness.leave(f"it gave up connecting ({type(error).__name__})", name)
            raise
