"""Who can't be told apart, or was started otherwise, is told so: what needs no second process to be tried."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import loco
from loco.coordination.rendezvous import Rendezvous, _CallState
from loco.coordination.site_directory import Arrival, SiteDirectory
from loco.coordination.store_client import RemoteStore
from loco.members import arrangement, sites
from loco.members.elastic.elastic_sites import ElasticSites
from loco.members.elastic.quorum import Claim, Member
from loco.members.one_world import ensure_process_group


class Mesh:
    """Of one dimension, which an odd world can't have."""

    ndim = 1
    mesh = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("rank", "world", "said"),
    [
        (0, 4, r"mesh has the ranks \[1, 2\], and rank 0 is not among them"),
        (1, 3, "mesh has 2 sites, which must divide the world's 3 ranks"),
    ],
)
def test_a_mesh_of_other_ranks_is_refused(
    rank: int, world: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrangement, "DeviceMesh", Mesh)
    with pytest.raises(ValueError, match=said):
        arrangement.peers_in_mesh(Mesh(), rank, world)


def test_a_torch_without_distributed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"loco needs torch\.distributed, which this build of torch was made"
    ):
        ensure_process_group()


def test_sites_that_are_built_again_close_those_of_before(caplog: pytest.LogCaptureFixture) -> None:
    class Earlier:
        closed = ""

        def close(self, why: str) -> None:
            self.closed = why

    earlier: Any = Earlier()
    sites._of_this_process["berlin", "at"] = earlier
    sites._close_earlier("berlin", "at")
    assert earlier.closed == "site berlin began anew in the same process"
    assert "this process builds its Sites of site berlin anew: those that it had are closed" in caplog.text


def test_who_is_left_out_and_who_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def member(name: str) -> Member:
        claim = Claim(round=1, digest="", ready=True)
        return Member(id=f"{name}:1", name=name, store="", claim=claim, where=f"process 1 on {name}")

    before: Any = SimpleNamespace(members=[member("a"), member("b")])
    now: Any = SimpleNamespace(
        members=[member("a"), member("c")], strangers=[member("d")], namesakes=[member("e")]
    )
    topology: Any = SimpleNamespace(plan=before)
    with caplog.at_level(logging.WARNING):
        ElasticSites._tell(topology, now)
    assert caplog.messages == [
        "the sites are now a, c (gone: b; come: c)",
        "d was set up differently, and is left out",
        "another process has the name e, and is left out: process 1 on e",
    ]


def test_a_store_that_has_lost_a_note_is_told_of() -> None:
    store = SimpleNamespace(check=lambda keys: False)
    context: Any = SimpleNamespace(store=store, world=1, rank=0, root="notes")
    with pytest.raises(RuntimeError, match="it has lost a note, or somebody else writes to it"):
        Rendezvous(context)._read(0, _CallState(notes={"0": "a"}))


def test_a_port_at_which_nobody_answers_as_a_store_does_is_named() -> None:
    class Silent(RemoteStore):
        def clone(self) -> Any:
            raise RuntimeError("it hung up")

    mine = Arrival(site="a", sites=2, at_least=2, ranks=1, process=1, where="here")
    with pytest.raises(loco.TransportError) as raised:
        SiteDirectory(Silent("127.0.0.1:1", "sites", 1.0), mine, dead_after=1.0)
    assert str(raised.value) == (
        "what listens at 127.0.0.1:1 does not answer as the sites' store does (it hung up): if it is another "
        "program, choose another port (LOCO_AT)"
    )


def test_a_name_that_loco_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'loco' has no attribute 'pulse'"):
        loco.pulse  # noqa: B018
