"""What `make test` leaves out is only what `make check` adds, and its sample has every pair of options."""

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import selection


def item(test: str, case: str = "", options: dict[str, Any] | None = None, **marks: Any) -> Any:
    """As much of a collected test as the selection looks at."""
    found = {name: SimpleNamespace(args=args, kwargs=kwargs) for name, (args, kwargs) in marks.items()}
    return SimpleNamespace(
        nodeid=f"{test}[{case}]" if case else test,
        callspec=SimpleNamespace(params=options or {}),
        get_closest_marker=found.get,
    )


class Item:
    """It can be a key, as a collected test can."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = fields


def collected(*items: Any) -> list[Any]:
    return [Item(vars(one)) for one in items]


def test_a_marked_test_is_left_out_and_of_its_cases_all_but_the_sample() -> None:
    whole = item("slow", check=(("everything",), {}))
    cases = [item("cases", name, check=(("more",), {"sample": "a|b.*"})) for name in ("a", "ab", "bc", "c")]
    items = collected(item("quick"), whole, *cases)
    out = selection.left_out(items)
    assert {one.nodeid: why for one, why in out.items()} == {
        "slow": "everything",
        "cases[ab]": "more",
        "cases[c]": "more",
    }
    assert selection.summary(out.values()) == ["     2  more", "     1  everything"]


def test_a_sample_that_matches_nothing_is_an_error() -> None:
    items = collected(item("cases", "a", check=(("more",), {"sample": "renamed"})))
    with pytest.raises(pytest.UsageError, match=r"samples that match no case: .*cases.*renamed"):
        selection.left_out(items)
    assert selection.left_out(items, whole=False) == {items[0]: "more"}


def test_of_a_product_every_pair_of_options_is_kept() -> None:
    options = {"a": "uvwxy", "b": "pqr", "c": "mn", "d": "kl"}
    cases = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    items = collected(*(item("product", str(case), case, pairs=((), {})) for case in cases))
    out = selection.left_out(items)
    assert set(out.values()) == {selection.PRODUCTS}
    kept = [case for case, one in zip(cases, items, strict=True) if one not in out]
    for one, other in combinations(options, 2):
        assert {(case[one], case[other]) for case in kept} == set(product(options[one], options[other]))
    assert len(kept) < len(cases) / 2


def test_cases_that_need_a_device_do_not_stand_for_those_that_run() -> None:
    options = [{"a": a, "b": b, "c": c} for a, b, c in product("uv", "pq", "mn")]
    cpu = [item("product", f"cpu{k}", case, pairs=((), {})) for k, case in enumerate(options)]
    gpu = [item("product", f"gpu{k}", case, pairs=((), {}), gpu=((), {})) for k, case in enumerate(options)]
    out = selection.left_out(items := collected(*gpu, *cpu))
    kept = [one.callspec.params for one in items if one not in out and not one.get_closest_marker("gpu")]
    for one, other in combinations("abc", 2):
        assert len({(case[one], case[other]) for case in kept}) == 4


def test_only_tests_that_are_marked_need_a_device(request: pytest.FixtureRequest) -> None:
    """The folder tests/gpu is no mark: most of its tests interpret or compile kernels without a GPU."""
    for one in request.session.items:
        if one.get_closest_marker("gpu") is None:
            reasons = [mark.kwargs.get("reason") for mark in one.iter_markers("skip")]
            assert "needs a CUDA or ROCm device" not in reasons, one.nodeid
