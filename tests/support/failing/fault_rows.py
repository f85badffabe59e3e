"""Which fault strikes, in which phases, and what must follow: the rows of the table in docs/failures.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fault_row import (
    AGAIN,
    ANY_OF_TWO,
    AS_BEFORE,
    CONTINUED,
    END,
    KILLED,
    LINK,
    LINK_MENDED,
    MENDED,
    NO_STORE,
    ONE_VERDICT,
    REFUSED,
    RESTARTED,
    ROUND,
    SAVED_AGAIN,
    STOPPED,
    TWO,
    Case,
    Row,
    late,
    silent,
)
from fault_rows_of_worlds import ROWS_OF_WORLDS
from fault_site import Setup

ROWS = (
    Row(fault="stopped (SIGSTOP)", phases=ROUND, **STOPPED, **silent()),
    Row(
        fault="stopped, and continued",
        phases=END,
        **CONTINUED,
        **silent(),
        dead_afters=2,
    ),
    Row(
        fault="stopped while it saves",
        phases=("checkpoint",),
        **{**STOPPED, "afterwards": SAVED_AGAIN},
        says="no heartbeat from site 1",
        text=r"after saving round 1: no heartbeat from site 1 .* \(so site \w+ gave it up\)",
    ),
    Row(fault="stopped in the repeat", phases=AGAIN, **STOPPED, **silent(), dead_afters=2),
    Row(
        fault="stopped, `dead_after` 5 s",
        phases=("inner step", "payload"),
        **STOPPED,
        **silent(),
        setup=Setup(dead_after=5.0),
    ),
    Row(
        fault="two of three stopped",
        phases=("payload", "voted"),
        **CONTINUED,
        says="no heartbeat from sites 1, 2",
        text=r".*no heartbeat from (sites? 1|site 2)",
        victims=(1, 2),
        by=(0,),
        dead_afters=2,
    ),
    Row(
        fault="site 0 stopped",
        phases=("payload", "voted"),
        **CONTINUED,
        **silent("0"),
        victims=(0,),
        by=(1, 2),
        dead_afters=2,
    ),
    Row(
        fault="a rank of a site of two stopped",
        phases=("payload", "voted", "apply"),
        **CONTINUED,
        says="no heartbeat from …",
        text=ANY_OF_TWO,
        by=(0, 2, 3),
        dead_afters=3,
        setup=TWO,
    ),
    Row(
        fault="killed (SIGKILL)",
        phases=ROUND,
        **KILLED,
        says="lost site 1",
        text=r"round 2, .*: (lost site|lost another site|site \w+ has left)",
    ),
    Row(
        fault="killed at the end of a round",
        phases=END,
        **KILLED,
        says="lost site 1",
        text=r".*(lost (site|rank|another)|site \w+ has left|no heartbeat from (site|rank) 1)",
        dead_afters=2,
    ),
    Row(
        fault="killed in the repeat",
        phases=AGAIN,
        **KILLED,
        says="no heartbeat from site 1",
        text=r".*(no heartbeat from site 1|lost (site|another)|site \w+ has left)",
        dead_afters=2,
    ),
    Row(
        fault="killed while it saves",
        phases=("checkpoint",),
        **KILLED,
        says="no heartbeat from site 1",
        text=r"after saving round 1: no heartbeat from site 1 .* \(so site \w+ gave it up\)",
    ),
    Row(
        fault="site 0 killed",
        phases=("inner step", "payload"),
        **KILLED,
        says="lost site 0",
        text=r"round 2, .*: (lost site|lost another site|site \w+ has left)",
        victims=(0,),
        by=(1, 2),
    ),
    Row(
        fault="a rank of a site of two killed",
        phases=("payload", "apply"),
        **KILLED,
        says="lost …",
        text=ANY_OF_TWO,
        by=(0, 2, 3),
        dead_afters=3,
        setup=TWO,
    ),
    Row(
        fault="connections closed",
        phases=ROUND,
        what="closed",
        flow="repeat",
        afterwards=AS_BEFORE,
        who="all",
        says="lost site …",
        text=r"round 2, .*(lost (site|another)|site \w+ has left)",
        by=(0, 1, 2),
    ),
    Row(
        fault="connections closed in the vote",
        phases=("voted",),
        what="closed",
        flow="repeat",
        afterwards=ONE_VERDICT,
        who="all or none",
        says="lost site …",
        text=r".*(lost (site|another)|site \w+ has left|another rank lost its links)",
        by=(),
    ),
    Row(
        fault="a link inside a site breaks",
        phases=("shared", "half shared"),
        what="link error",
        flow="repeat",
        afterwards="after the round on all; the ranks of the site complete it together",
        who="all",
        says="lost rank of this site …",
        text=r".*(a link broke|lost (site|rank of this site|another)|has left)",
        by=(0, 1, 2, 3),
        dead_afters=2,
        setup=TWO,
    ),
    Row(fault="link cut", phases=ROUND, **LINK, **silent()),
    Row(
        fault="link cut while it saves",
        phases=("checkpoint",),
        **{**LINK, "afterwards": SAVED_AGAIN},
        says="no heartbeat from site 1",
        text=r"after saving round 1: no heartbeat from site 1 .* \(so site \w+ gave it up\)",
    ),
    Row(
        fault="link cut, and mended",
        phases=("voted", "decision"),
        **LINK_MENDED,
        **silent(),
        dead_afters=2,
    ),
    Row(
        fault="link cut",
        phases=("as the cut-off site sees it",),
        **LINK,
        who="site 1",
        says=NO_STORE,
        text=rf"round 2, .*: {NO_STORE} for 2 s",  # the others' announcements may have come before the cut
        by=(1,),
        dead_afters=2,
    ),
    Row(
        fault="3 s late, but alive",
        phases=ROUND,
        what="late",
        flow="nothing",
        afterwards="the round succeeds: the others wait for it",
        seconds=3.0,
    ),
    Row(
        fault="later than `patience` 5 s",
        phases=("inner step",),
        what="late",
        flow="repeat",
        afterwards=AS_BEFORE,
        says=late(5),
        # Of two that give up in the same moment one may say what the other has said.
        text=rf"round 2, announcement: (site \w+ has left: round 2, announcement: )?{late(5)}",
        dead_afters=3,
        seconds=7.0,
        setup=Setup(patience=5.0),  # within which all must have started, too
    ),
    Row(
        fault="later than `timeout` 2 s",
        phases=("payload",),
        what="late",
        flow="repeat",
        afterwards=AS_BEFORE,
        says=late(2),
        text=r"round 2, .*: (no answer from site \w+ within 2 s, which is alive|lost|site \w+ has left)",
        dead_afters=2,
        seconds=3.0,
        setup=Setup(timeout=2.0),
    ),
    Row(
        fault="a damaged payload",
        phases=("payload",),
        what="damaged",
        flow="repeat",
        afterwards=AS_BEFORE,
        kind="WireError",
        says="the message of site 1 can't be read",
        text=r"round 2.*(the message of site 1 can't be read|could not read the message of site 1)",
    ),
    *(
        Row(
            fault=f"{what} in the weights",
            phases=("inner step",),
            what=what,
            flow="repeat",
            afterwards=MENDED,
            who="all",
            kind="NonFiniteError",
            says="site 1: the update of … is infinite or NaN",
            text=r"round 2, site 1: the update of group0\.param3 is infinite or NaN",
            by=(0, 1, 2),
        )
        for what in ("NaN", "Inf")
    ),
    Row(
        fault="one bit of θ flipped",
        phases=("inner step",),
        what="flipped",
        flow="repeat",
        afterwards=MENDED,
        who="all",
        kind="ReplicaError",
        says="the sites' anchors differ",
        text=r"round 2: the sites' anchors differ \(site 0 holds \w+, site 1 holds \w+, site 2 holds",
        by=(0, 1, 2),
    ),
    Row(
        fault="other hyperparameters",
        phases=("construction",),
        what="hyperparameters",
        flow="refuse",
        afterwards=REFUSED,
        who="all",
        kind="AgreementError",
        says="the sites differ in outer_lr",
        text=r"the sites differ in outer_lr: site 0 has 0\.7, site 1 has 0\.5",
        by=(0, 1, 2),
    ),
    Row(
        fault="a clock that is an hour wrong",
        phases=("inner step",),
        what="clock",
        flow="nothing",
        afterwards="the round succeeds",
    ),
    Row(
        fault="steps a million times too large",
        phases=("inner step",),
        what="huge",
        flow="nothing",
        afterwards="the round succeeds; `update_norms` in the report show it",
    ),
    Row(
        fault="the same, `outlier_factor` 100",
        phases=("inner step",),
        what="huge",
        flow="nothing",
        afterwards="the round succeeds without that site, whose update stays in its e",
        setup=Setup(outlier_factor=100.0),
    ),
    Row(
        fault="a full disk",
        phases=("checkpoint",),
        what="full disk",
        flow="repeat",
        afterwards=SAVED_AGAIN,
        who="all",
        kind="CheckpointError",
        says="site 1 failed: … could not be written",
        text=r".*could not be written .*No space left on device",
        by=(0, 1, 2),
    ),
    *(
        Row(
            fault=f"the store's host {done}",
            phases=("inner step",),
            what=what,
            flow="store",
            afterwards=afterwards,
            says=NO_STORE,
            # A slow rank may still be about to ask for the verdict on round 1.
            text=rf"(round 2, announcement: {NO_STORE} for 2 s|.*the sites' store does not answer)",
            dead_afters=2,
            seconds=6.0,
        )
        for done, what, afterwards in (
            ("stopped", "SIGSTOP", AS_BEFORE),
            ("killed", "SIGKILL", RESTARTED),
        )
    ),
    *ROWS_OF_WORLDS,
)

CASES = tuple(Case(row, phase) for row in ROWS for phase in row.phases)
_OF_A_FLIGHT = {"inner step", "announcement", "payload", "vote", "voted", "decision", "shared", "half shared"}


def _in_flight(row: Row) -> Iterator[Case]:
    """The first and the last phase of a row that a round in flight has.

    Where a site has several ranks, a round that fails is sent again in flight: after an error of one of them
    they would not make equally many inner steps, as only their gradients' average sees to.
    """
    if row.what in ("huge", "flipped") or row.fault.endswith("in the weights"):
        return  # test_overlap_faults.py
    if row.setup.ranks_per_site > 1:
        if row.flow == "repeat":
            row = replace(row, flow="nothing", says="", setup=replace(row.setup, repeats=2))
        elif row.flow != "restart":
            return
    setup = replace(row.setup, overlap=True)
    # The boundary before which a fault strikes sends off round 3, and saving goes on beside it.
    text = row.text.replace("round 2", "round [23]") + r"|(after )?saving round \d(, step \d+)?: no heartbeat"
    phases = [phase for phase in row.phases if phase in _OF_A_FLIGHT]
    for phase in dict.fromkeys([*phases[:1], *phases[-1:]]):
        yield Case(replace(row, setup=setup, text=text), phase)


IN_FLIGHT = tuple(case for row in ROWS for case in _in_flight(row))


def table(seconds: Mapping[int, Sequence[float]]) -> str:
    """The table in docs/failures.md; `seconds` from the fault to each error, as measured, by row number."""
    lines = [
        "| what happens | in which phases | who raises, and what | after, s | state |",
        "|---|---|---|---|---|",
    ]
    for number, row in enumerate(ROWS):
        raised = f"{row.who}: `{row.kind}`, “{row.says}”" if row.says else "no rank"
        times = seconds.get(number, [])
        ends = [f"{end:.1f}" for end in (min(times), max(times))] if times else ["–"]
        within = "–".join(dict.fromkeys(ends))
        lines.append(f"| {row.fault} | {', '.join(row.phases)} | {raised} | {within} | {row.afterwards} |")
    return "\n".join(lines)
