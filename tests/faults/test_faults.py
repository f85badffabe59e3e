"""Faults, tried for real: noticed in time and by name, they cost no bit of state, and leave nobody behind."""

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fault_cases import Played, play
from fault_harness import Run
from fault_row import VERDICT_LOST, Case
from fault_rows import CASES, IN_FLIGHT, ROWS, table
from fault_site import Setup
from faulty import Fault
from followed import Followed
from selection import CELLS, INTERRUPTIONS
from states import assert_same

from experiments.processes.namespaces import why_not

# Beyond what a row allows: on two shared cores a process may not run for seconds. A hang would be longer by
# far: patience and timeout are 40 s.
MARGIN = 5.0
# For `make test`: of each flow one fault, of sites of one rank and of two, in a round and in its repeat.
SAMPLE = {
    "connections closed, announcement",
    "the store's host stopped, inner step",
    "stopped (SIGSTOP), payload",
    "killed (SIGKILL), vote",
    "a rank of a site of two killed, apply",
    "loco.Sites: that rank killed at the end of a round, voted",
    "link cut, payload",
    "other hyperparameters, construction",
    "steps a million times too large, inner step",
}
# What to do, at the end of each TransportError.
REMEDY = re.compile(
    r"(All ranks can go on with the next step\(\) or sync\(\)|give all sites the same max_steps|"
    r"What this site had sent goes with the next round: call step\(\) or sync\(\) again on all ranks|"
    r"Earlier checkpoints are as they were: save again|Start all sites again|the next call asks it again)"
    r".*[^.]$"
)
PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


def needs_root(case: Case) -> bool:
    return case.row.setup.networks or case.row.what == "full disk"


def marked(case: Case) -> object:
    marks = [] if case.name in SAMPLE else [pytest.mark.check(CELLS)]
    if needs_root(case):
        why = why_not()
        marks += [pytest.mark.root, pytest.mark.skipif(why is not None, reason=why or "")]
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(scope="session")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Played]]:
    """Each case that a test wants is played once. They wait more than they work, so two at a time."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [call.params.get("case") for call in calls if call is not None]
    with ThreadPoolExecutor(2) as pool:
        futures: dict[Case, Future[Played]] = {}
        for case in wanted:
            if isinstance(case, Case) and case not in futures and not (needs_root(case) and why_not()):
                futures[case] = pool.submit(play, case, tmp_path_factory.mktemp("fault"))
        yield lambda case: futures[case].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", [marked(case) for case in (*CASES, *IN_FLIGHT)])
def test_it_is_noticed_in_time_and_by_name(case: Case, played: Callable[[Case], Played]) -> None:
    row, told = case.row, played(case).told
    if not row.says:
        assert not any(told.raised.values())
        return
    raised = {rank: told.since(rank, row.victims) for rank in told.raised}
    for rank in row.by or (rank for rank, errors in raised.items() if errors):
        first = raised[rank][0]
        assert first.kind == row.kind
        assert re.match(row.text, first.text), first.text
        assert first.kind != "TransportError" or len(REMEDY.findall(first.text)) == 1, first.text
        assert told.within(rank, row.victims) <= row.dead_afters * row.setup.dead_after + MARGIN


@pytest.mark.parametrize("case", [marked(case) for case in CASES if case.row.what != "huge"])
def test_no_bit_is_lost_or_invented(case: Case, played: Callable[[Case], Played]) -> None:
    """What failed left θ, m, e and w as they were; and the run ends as the one without a fault."""
    row, told = case.row, played(case).told
    for rank, errors in told.raised.items():
        for error in errors:
            # The round counts, and a rank of a site of two has only part of it until the two can talk again.
            half = row.setup.ranks_per_site > 1 and re.match(
                r".*anchor inside the site|.*connecting: ", error.text
            )
            assert error.unchanged or half, f"rank {rank}: {error.text}"
    if row.flow == "refuse":
        return
    ended = played(case).restarted or told
    assert sorted(ended.states) == list(range(row.setup.world))
    for rank, states in ended.states.items():
        assert_same(states[-1], played(case).clean.states[rank][-1])
    # Those who were left had agreed, too, on how far they had come and on θ; where the verdict was lost, only
    # those who had come equally far.
    by_round: dict[int, set[tuple[int, bytes]]] = {}
    for done, *part in told.last.values():
        by_round.setdefault(done, set()).add(tuple(part))
    assert all(len(parts) <= row.setup.ranks_per_site for parts in by_round.values())
    if row.afterwards == VERDICT_LOST:
        assert set(by_round) <= {Fault.round - 1, Fault.round}
    else:
        assert len(by_round) == 1


@pytest.mark.parametrize("case", [marked(case) for case in IN_FLIGHT])
def test_with_a_round_in_flight_no_bit_is_lost_or_invented(
    case: Case, played: Callable[[Case], Played]
) -> None:
    """Whatever counted and whatever failed: the end is what the specification makes of the same steps,
    boundaries and failures."""
    ended = played(case).restarted or played(case).told
    if played(case).restarted is not None:
        for rank, states in ended.states.items():
            assert_same(states[-1], played(case).clean.states[rank][-1])
        return
    each = case.row.setup.ranks_per_site
    sites = case.row.setup.world // each
    specified = Followed(sites)
    specified.follow(ended.history)
    for rank, states in ended.states.items():
        specified.check(rank // each, states[-1], start=ended.last[rank][1])


@pytest.mark.parametrize("case", [marked(case) for case in (*CASES, *IN_FLIGHT)])
def test_every_process_ends_as_it_should(case: Case, played: Callable[[Case], Played]) -> None:
    told = played(case).told
    killed = case.row.victims if case.row.flow == "restart" else ()
    assert told.codes == {rank: -9 if rank in killed else 0 for rank in range(case.row.setup.world)}


@pytest.mark.parametrize("case", [marked(case) for case in CASES if case.row.what == "huge"])
def test_a_site_gone_wild_is_seen_in_the_report_and_left_out_on_request(
    case: Case, played: Callable[[Case], Played]
) -> None:
    told = played(case).told
    assert sorted(told.reports) == [0, 1, 2]
    for rank, (first, wild, _) in told.reports.items():
        assert wild.update_norms[1] > 1000 * max(wild.update_norms[0], wild.update_norms[2])
        assert first.left_out == ()
        assert wild.left_out == (("1",) if case.row.setup.outlier_factor else ())
        assert_same(*({"anchor": told.states[r][-1]["anchor"]} for r in (0, rank)))
        if rank == 1 and wild.left_out:  # what it has not sent is in its residual
            residual = told.states[rank][2]["residual"].view(np.float32).astype(np.float64)
            assert np.linalg.norm(residual) >= wild.update_norms[rank] * (1 - 1e-6)


def test_the_sample_has_every_flow() -> None:
    sample = [case for case in CASES if case.name in SAMPLE]
    assert len(sample) == len(SAMPLE)
    assert {case.row.flow for case in sample} == {row.flow for row in ROWS}
    assert {case.row.setup.ranks_per_site for case in sample} == {1, 2}


def test_the_page_has_a_row_for_every_fault_and_phase_that_is_tried() -> None:
    def without_times(lines: str) -> list[list[str]]:
        rows = [line.split(" | ") for line in lines.splitlines() if line.startswith("| ")]
        return [[*cells[:3], *cells[4:]] for cells in rows]

    start = PAGE.index("| what happens | in which phases |")
    assert without_times(PAGE[start:].split("\n\n")[0]) == without_times(table({}))
    assert len(CASES) == sum(len(row.phases) for row in ROWS) == len({case.name for case in CASES})


@pytest.mark.check(INTERRUPTIONS)
def test_the_same_round_can_fail_again_and_again_while_a_site_is_stopped() -> None:
    with Run(Setup(dead_after=0.5), [Fault("SIGSTOP", "payload")]) as run:
        for _ in range(4):
            run.all_raised([0, 2])
            run.again()
        run.send(1, signal.SIGCONT)
        run.finish()
    assert all(len(run.told.raised[rank]) >= 4 for rank in (0, 2))
    assert all(error.unchanged for errors in run.told.raised.values() for error in errors)
    assert len({states[-1]["anchor"].tobytes() for states in run.told.states.values()}) == 1
