"""What the sites of a quorum do is decided from what they say, by each of them alike."""

from typing import Any

from loco.members.elastic.quorum import Claim, Member, Plan, plan


def site(
    name: str, round: int, digest: str = "x", *, ready: bool = True, process: str = "1", **more: Any
) -> Member:
    claim = Claim(round=round, digest=digest, ready=ready, **{"setup": "same", **more})
    return Member(id=f"{name}:{process}", name=name, store="host:1", claim=claim)


def names(decided: Plan, places: tuple[int, ...]) -> list[str]:
    return [decided.members[place].name for place in places]


def given(decided: Plan) -> dict[str, str]:
    return {decided.members[to].name: decided.members[by].name for to, by in decided.newcomers.items()}


def test_the_order_in_which_sites_are_listed_does_not_matter() -> None:
    sites = [site("a", 3), site("b", 3), site("c", 2, "y")]
    assert plan("q", sites) == plan("q", sites[::-1])


def test_sites_that_hold_the_same_run_a_round() -> None:
    decided = plan("q", [site("b", 3), site("a", 3)])
    assert names(decided, decided.workers) == ["a", "b"]
    assert decided.runs
    assert not decided.newcomers


def test_who_is_behind_is_given_the_result() -> None:
    decided = plan("q", [site("a", 0, "z"), site("b", 3), site("c", 3)])
    assert names(decided, decided.workers) == ["b", "c"]
    assert given(decided) == {"a": "b"}


def test_who_only_arrives_is_not_one_of_the_round_even_if_it_holds_the_same() -> None:
    decided = plan("q", [site("a", 3, ready=False), site("b", 3)])
    assert names(decided, decided.workers) == ["b"]
    assert given(decided) == {"a": "b"}


def test_who_arrives_with_more_rounds_does_not_take_over_a_run() -> None:
    decided = plan("q", [site("a", 9, ready=False), site("b", 3)])
    assert given(decided) == {"a": "b"}


def test_who_is_ready_and_has_done_no_round_does_not_undo_what_another_brings() -> None:
    """A restart, in which one site has lost its checkpoints and so has nothing to load."""
    decided = plan("q", [site("a", 0, "new"), site("b", 9, ready=False), site("c", 9, ready=False)])
    assert names(decided, decided.workers) == ["b", "c"]
    assert given(decided) == {"a": "b"}
    assert not decided.runs


def test_in_the_first_round_who_joins_is_given_what_the_others_hold() -> None:
    decided = plan("q", [site("a", 0, "new", ready=False), site("b", 0)])
    assert names(decided, decided.workers) == ["b"]
    assert given(decided) == {"a": "b"}
    assert decided.runs


def test_at_a_start_the_first_site_gives_its_state_and_no_round_is_run() -> None:
    decided = plan("q", [site(name, 0, name, ready=False) for name in "cab"])
    assert not decided.runs
    assert given(decided) == {"b": "a", "c": "a"}


def test_those_who_resume_from_the_same_round_need_nothing() -> None:
    decided = plan("q", [site("a", 5, ready=False), site("b", 5, ready=False)])
    assert not decided.runs
    assert not decided.newcomers


def test_newcomers_are_shared_out() -> None:
    old, new = [site(name, 3) for name in "ab"], [site(name, 0, name, ready=False) for name in "wxyz"]
    assert given(plan("q", [*new, *old])) == {"w": "a", "x": "b", "y": "a", "z": "b"}


def test_of_two_states_of_one_round_the_more_common_one_stays() -> None:
    decided = plan("q", [site("a", 3, "y"), site("b", 3), site("c", 3)])
    assert names(decided, decided.workers) == ["b", "c"]
    assert given(decided) == {"a": "b"}
    tie = plan("q", [site("b", 3), site("a", 3, "y")])
    assert names(tie, tie.workers) == ["a"]


def test_a_site_that_settles_a_round_in_doubt_is_not_one_of_the_next_round() -> None:
    """It has done no inner steps since: with Δ = 0 it would weaken the mean."""
    sites = [site("a", 4, "new", committed="q7"), site("b", 3, doubt="q7"), site("c", 3)]
    decided = plan("q8", sites)
    assert names(decided, decided.workers) == ["a"]
    assert given(decided) == {"b": "a", "c": "a"}
    alone = plan("q8", sites[1:])  # nobody who is left has committed it
    assert names(alone, alone.workers) == ["b", "c"]


def test_a_doubt_about_another_attempt_is_not_settled() -> None:
    decided = plan("q8", [site("a", 4, "new", committed="q7"), site("b", 3, doubt="q6")])
    assert names(decided, decided.workers) == ["a"]
    assert given(decided) == {"b": "a"}


def test_links_are_kept_only_if_all_hold_the_same() -> None:
    old = [site("a", 3, links="q1"), site("b", 3, links="q1")]
    assert plan("q2", old).keep_links
    assert not plan("q2", [*old, site("c", 0, ready=False)]).keep_links
    assert not plan("q2", [old[0], site("b", 3, links="q0")]).keep_links
    assert not plan("q2", [site("a", 3), site("b", 3)]).keep_links


def test_who_was_set_up_differently_is_left_out() -> None:
    other = site("a", 0, ready=False, setup="other")
    decided = plan("q", [other, site("b", 3)])
    assert [member.name for member in decided.members] == ["b"]
    assert decided.strangers == (other,)
    assert decided.index_of(other.id) == -1


def test_a_hollow_state_is_never_given() -> None:
    hollow = site("a", -1, "half")
    for ready in (True, False):
        decided = plan("q", [hollow, site("b", 0, "w", ready=ready)])
        assert given(decided) == {"a": "b"}


def test_of_two_processes_with_one_name_the_one_that_trained_before_takes_part() -> None:
    old, new = site("a", 3, process="2", belongs=True), site("a", 0, ready=False, process="1")
    decided = plan("q", [new, site("b", 3, belongs=True), old])
    assert names(decided, decided.workers) == ["a", "b"]
    assert decided.namesakes == (new,)
    assert decided.index_of(new.id) == -1
    assert not given(decided)


def test_of_two_new_processes_with_one_name_one_takes_part() -> None:
    first, second = (site("a", 0, ready=False, process=number) for number in "12")
    for quorum in ([first, second], [second, first]):
        decided = plan("q", quorum)
        assert decided.members == (first,)
        assert decided.namesakes == (second,)


def test_a_namesake_does_not_decide_what_the_run_is() -> None:
    ahead = site("a", 9, process="2", setup="other")
    decided = plan("q", [site("a", 3, process="1", belongs=True), site("b", 3), ahead])
    assert names(decided, decided.workers) == ["a", "b"]
    assert not decided.strangers
