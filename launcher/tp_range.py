"""Several numbers of ranks on one command line: `1..8` or `1,2,4`."""

from __future__ import annotations

from paceline.coordinator.errors import InputError

MOST_RANKS = 1024


def is_tp_range(text: str) -> bool:
    """Whether this names several numbers of ranks, which one process tries in turn."""
    return ".." in text or "," in text


def parse_tp_range(text: str) -> tuple[int, ...]:
    """The numbers of ranks that are named, in order. Raises InputError for anything but whole numbers from 1 on."""
    values: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        ends = [first, last] if dots else [first]
        # Not int() alone, which also takes "1_0" and " 2".
        if not all(end.isascii() and end.isdigit() and 0 < int(end) <= MOST_RANKS for end in ends):
            raise InputError(f"--tp must be like 4, 1..8 or 1,2,4, with numbers from 1 to {MOST_RANKS}, got {text!r}")
        values += range(int(ends[0]), int(ends[-1]) + 1)
    if not values:
        raise InputError(f"--tp {text} names no number of ranks: the first must not be above the last")
    return tuple(dict.fromkeys(values))
