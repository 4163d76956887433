import math

import pytest

from prospr.lab.stats import summarise, t_quantile, t_within


def test_mean_deviation_and_interval_by_hand():
    # 2, 4, 9: mean 5, squares 9 + 1 + 16 = 26, variance 13; half-width 4.302653 * sqrt(13 / 3)
    found = summarise([2.0, 4.0, 9.0])
    assert (found.n, found.mean) == (3, 5.0)
    assert found.sd == pytest.approx(math.sqrt(13))
    assert found.high - found.mean == pytest.approx(4.3026527 * math.sqrt(13 / 3), rel=1e-7)
    assert found.low + found.high == pytest.approx(10)
    assert not found.excludes_zero
    assert summarise([2.0, 2.1, 2.2]).excludes_zero
    assert summarise([-2.0, -2.1, -2.2]).excludes_zero


# the tables every statistics book prints
@pytest.mark.parametrize(
    ("degrees", "level", "quantile"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.3027), (3, 0.95, 3.1824), (4, 0.95, 2.7764), (5, 0.95, 2.5706), (9, 0.95, 2.2622),
     (30, 0.95, 2.0423), (1000, 0.95, 1.9623), (2, 0.99, 9.9248), (7, 0.9, 1.8946)],
)  # fmt: skip
def test_t_quantiles_of_the_tables(degrees, level, quantile):
    assert t_quantile(degrees, level) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize("degrees", range(1, 12))
def test_t_probability_is_the_densitys_integral(degrees):
    scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    steps = 20_000
    width = 1.7 / steps
    middles = ((index + 0.5) * width for index in range(steps))
    area = 2 * scale * width * math.fsum((1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middles)
    assert t_within(1.7, degrees) == pytest.approx(area, abs=1e-8)


def test_too_few_values_give_no_interval():
    one = summarise([3.0])
    assert (one.n, one.mean) == (1, 3.0)
    assert all(math.isnan(value) for value in (one.sd, one.low, one.high))
    assert not one.excludes_zero
    assert math.isnan(summarise([]).mean)


def test_impossible_quantiles_are_refused():
    with pytest.raises(ValueError, match="degrees 0"):
        t_quantile(0)
    with pytest.raises(ValueError, match=r"level 1\.0"):
        t_quantile(3, 1.0)
