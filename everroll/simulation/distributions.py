"""Latencies and lengths as people measure them: a median and a 95th percentile."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_Z95 = 1.6448536269514722
"""Standard deviations from the mean to the 95th percentile of a normal distribution."""


@dataclass(frozen=True)
class Distribution:
    """Log-normal, given by two of its quantiles; a constant when both are equal."""

    median: float
    p95: float

    def __post_init__(self) -> None:
        if self.median < 0 or self.p95 < self.median or (self.median == 0 and self.p95 > 0):
            raise ValueError(
                f"a median of {self.median:g} and a 95th percentile of {self.p95:g}: the median must be above 0 (or "
                f"both 0), and the percentile at least the median"
            )

    def draw(self, generator: random.Random) -> float:
        if self.p95 == self.median:
            return self.median
        return generator.lognormvariate(math.log(self.median), math.log(self.p95 / self.median) / _Z95)


def build_distribution(median: float, p95: float | None) -> Distribution:
    """Without a 95th percentile, a constant.

    Raises:
        ValueError: the two do not go together.
    """
    return Distribution(median, median if p95 is None else p95)
