"""A TransportError says what to do, once; durations in round seconds; and whose store is lost."""

from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from loco.coordination.store_client import RemoteStore, StoreClient, no_store
from loco.errors import BUILD_ANEW, PROGRAM_ENDED, TransportError, advising, seconds


def test_an_error_that_leaves_ends_with_what_to_do_and_only_once() -> None:
    with pytest.raises(TransportError) as raised, advising("Start again"), advising("Save again"):
        raise TransportError("saving: lost site 1", lasting=True)
    assert str(raised.value) == "saving: lost site 1. Save again"
    assert raised.value.lasting


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TransportError("open the port", has_remedy=True), "open the port"),
        (TransportError(f"site a has left: {BUILD_ANEW}"), f"site a has left: {BUILD_ANEW}"),
        (TransportError(f"site a has left: {PROGRAM_ENDED}"), f"site a has left: {PROGRAM_ENDED}. Ended"),
        (TransportError("lost site a"), "lost site a. Repeat"),
    ],
)
def test_the_remedy_is_that_of_the_cause(error: TransportError, text: str) -> None:
    with pytest.raises(TransportError) as raised, advising("Repeat", if_ended="Ended"):
        raise error
    assert str(raised.value) == text


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="outer_lr"), advising("Repeat"):
        raise ValueError("outer_lr")


@pytest.mark.parametrize(
    ("duration", "text"),
    [(4.000213, "4 s"), (599.98, "600 s"), (1234.5, "1234 s"), (0.0312, "0.0312 s"), (2.5, "2.5 s")],
)
def test_seconds_are_rounded(duration: float, text: str) -> None:
    assert seconds(duration) == text


def test_a_lost_store_is_named_with_the_site_that_hosts_it() -> None:
    at = "10.0.0.1:29510"
    refused = RuntimeError(f"{at} can't be reached: refused\nwith a stack")
    silent = RuntimeError("no answer within 5 s")

    def told(store: object, error: RuntimeError) -> str:
        return str(no_store("saving", store, error)).removeprefix("saving: the sites' store does not answer ")

    of_berlin, of_nobody = RemoteStore(at, "", 1.0, hosted_by="berlin"), RemoteStore(at, "", 1.0)
    assert told(of_berlin, silent) == f"(site berlin hosts it at {at}: no answer within 5 s)"
    assert told(of_berlin, refused) == f"(site berlin hosts it: {at} can't be reached: refused)"
    assert told(of_nobody, silent) == f"(it is at {at}: no answer within 5 s)"
    assert told(of_nobody, refused) == f"({at} can't be reached: refused)"
    assert told(HashStore(), silent) == "(no answer within 5 s)"
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    client = StoreClient(PrefixStore("p", host), limit=20.0)
    of_torch = f"torchrun's first node, or rank 0, hosts it at 127.0.0.1:{host.port}"
    assert told(client, silent) == f"({of_torch}: no answer within 5 s)"
    client.close()
