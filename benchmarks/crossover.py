"""Where one way of computing becomes faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping


def crossover(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> int | None:
    """The size from which on our times are the lower ones up to the largest size, or None where they never are.

    Times by size, of the same sizes; None is one that does not fit in memory, and counts as the slower. Where we are
    faster everywhere it is the smallest size; else the sizes on either side are joined by a straight line between the
    logarithms.
    """
    sizes = sorted(ours)
    ratios = {size: _log_ratio(ours[size], theirs[size]) for size in sizes}
    if ratios[sizes[-1]] >= 0:
        return None
    last_slower = max((size for size in sizes if ratios[size] >= 0), default=None)
    if last_slower is None:
        return sizes[0]
    next_size = sizes[sizes.index(last_slower) + 1]
    above, below = ratios[last_slower], ratios[next_size]
    if math.isinf(above) or math.isinf(below):
        return next_size
    share = above / (above - below)
    return math.ceil(math.exp((1 - share) * math.log(last_slower) + share * math.log(next_size)))


def _log_ratio(ours: float | None, theirs: float | None) -> float:
    """Below zero where ours is the faster."""
    if ours is None or theirs is None:
        return math.inf if ours is None else -math.inf
    return math.log(ours / theirs)
