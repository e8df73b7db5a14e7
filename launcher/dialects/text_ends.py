"""Looking for a text in one that is not complete."""

from __future__ import annotations


def beginning_at_end(text: str, wanted: str) -> int:
    """Length of the longest end of `text` with which `wanted` begins, without being complete."""
    for length in range(min(len(text), len(wanted) - 1), 0, -1):
        if wanted.startswith(text[-length:]):
            return length
    return 0
