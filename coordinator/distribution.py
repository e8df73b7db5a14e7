"""How many observations lie in which range: what a histogram of Prometheus is made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """Observations counted in buckets, and their sum. For one thread; counting takes a fraction of a microsecond."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """bounds: the highest value of each bucket, ascending; one more bucket takes what is above the last.

        counts: observations of each bucket so far, one more than there are bounds, or none; total: their sum.
        """
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.sum = total

    def add(self, value: float, times: int = 1) -> None:
        """Count an observation that was made so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Distribution):
            return NotImplemented
        return (self.bounds, self.counts, self.sum) == (other.bounds, other.counts, other.sum)

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)

    def copy(self) -> Distribution:
        """The same, which later observations do not change."""
        return Distribution(self.bounds, self.counts, self.sum)
