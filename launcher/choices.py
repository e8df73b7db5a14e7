"""Several answers to one prompt."""

from __future__ import annotations


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's index-th choice: the given one for the first, the others derived from it (64-bit)."""
    if seed is None or index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
