"""What a few seeds say, against figures computed by hand and from Student's published table."""

import pytest

from experiments.reporting.statistics import Interval, difference, of_mean, of_share, ratio, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (20, 2.086), (21, 2.080), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_published_table(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_quantiles_fall_to_the_normals_without_a_step_where_the_table_ends() -> None:
    quantiles = [t_quantile(freedom) for freedom in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert t_quantile(10**9) == pytest.approx(1.959964)


def test_no_interval_without_freedom() -> None:
    with pytest.raises(ValueError, match="freedom must be at least 1, got 0"):
        t_quantile(0)


def test_a_mean_of_three_has_students_interval() -> None:
    # Mean 2, standard deviation 1: 4.30265 / √3.
    found = of_mean([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(2.484137)


def test_one_value_has_no_interval() -> None:
    assert of_mean([5.0]) == Interval(5.0, None)


def test_equal_values_have_an_interval_of_nothing() -> None:
    assert of_mean([0.5, 0.5]) == Interval(0.5, 0.0)


def test_a_share_has_wilsons_interval() -> None:
    # p = 1/2, n = 100: Wilson's ends are 0.40383 and 0.59617.
    assert of_share(0.5, 100).half == pytest.approx((0.59617 - 0.40383) / 2, abs=1e-5)


def test_a_share_of_all_still_has_an_interval() -> None:
    # p = 1: Wilson's lower end is n / (n + z²) = 100 / 103.8415 = 0.96301.
    assert of_share(1.0, 100).half == pytest.approx((1 - 0.96301) / 2, abs=1e-5)


def test_differences_are_paired_by_seed_whatever_their_order() -> None:
    # Seeds are far apart, methods always by 1 and 3: ± 12.7062 · √2 / √2.
    found = difference({1: 11.0, 0: 103.0}, {0: 100.0, 1: 10.0, 7: -5.0})
    assert found is not None
    assert found.mean == 2.0
    assert found.half == pytest.approx(12.7062)


def test_without_a_common_seed_there_is_no_difference_and_no_ratio() -> None:
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert ratio({0: 1.0}, {1: 1.0}) is None


def test_a_ratio_is_of_means_over_common_seeds() -> None:
    # (1 + 3) / (4 + 4); deviations 1 − 2 and 3 − 2 with standard deviation √2: 12.7062 · √2 / √2 / 4.
    found = ratio({0: 1.0, 1: 3.0, 2: 99.0}, {0: 4.0, 1: 4.0})
    assert found is not None
    assert found.mean == 0.5
    assert found.half == pytest.approx(12.7062 / 4)


def test_a_ratio_in_proportion_has_no_spread() -> None:
    found = ratio({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0})
    assert found is not None
    assert (found.mean, found.half) == (0.5, pytest.approx(0.0))


def test_a_reference_that_gains_nothing_has_no_share() -> None:
    assert ratio({0: 1.0}, {0: 0.0}) is None
    assert ratio({0: 1.0}, {0: -1.0}) is None


def test_an_interval_in_points_keeps_a_half_that_is_positive() -> None:
    assert Interval(0.5, 0.1).times(-100) == Interval(-50.0, 10.0)
