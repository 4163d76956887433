"""Means, deviations and intervals of a handful of runs, exact and without a statistics library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 3  # seeds that a verdict takes: the interval of two is as good as none, and of two alike it has no width


@dataclass(frozen=True)
class Summary:
    """`n` values, their mean and sample standard deviation, and the mean's interval; NaN where n is too small."""

    n: int
    mean: float
    sd: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero; False where there is no interval."""
        return self.low > 0 or self.high < 0

    @property
    def settled(self) -> bool:
        """Whether these differences show that there is one: three or more, not all the same, zero outside."""
        return self.n >= LEAST and self.sd > 0 and self.excludes_zero


def summarise(values: Sequence[float], level: float = 0.95) -> Summary:
    """Mean, deviation and Student's t interval of `values`.

    >>> summarise([1.0, 2.0, 3.0])
    Summary(n=3, mean=2.0, sd=1.0, low=-0.484..., high=4.484...)
    """
    n = len(values)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, math.nan)
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(1, mean, math.nan, math.nan, math.nan)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(n - 1, level) * sd / math.sqrt(n)
    return Summary(n, mean, sd, mean - half, mean + half)


def t_quantile(degrees: int, level: float = 0.95) -> float:
    """The t with `level` of Student's distribution between -t and t.

    >>> round(t_quantile(2), 4)
    4.3027
    """
    if degrees < 1 or not 0 < level < 1:
        raise ValueError(f"degrees {degrees} and level {level}: degrees must be at least 1, level between 0 and 1")
    low, high = 0.0, 1.0
    while t_within(high, degrees) < level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def t_within(t: float, degrees: int) -> float:
    """The probability that a Student variable lies between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (theta + (sine * total if degrees > 1 else 0.0))
