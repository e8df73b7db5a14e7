"""Checks of single values that a person gave; InputError names the field and says what it takes."""

from __future__ import annotations

import reprlib

from paceline.coordinator.errors import InputError

MAX_INT32 = 2**31 - 1
"""Token ids and counts travel to the ranks, and lie in their memory, as 32-bit integers."""


def is_int(value: object) -> bool:
    """Whether value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InputError where value is no whole number from low to high; None is no upper bound."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name} must be a whole number {wanted}, got {shown(value)}")


def check_number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    """Raise InputError where value is no number from low to high; above_low leaves out low itself."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputError(f"{name} must be a number, got {shown(value)}")
    if not low <= value <= high or (above_low and value == low):  # NaN is in no range
        wanted = f"above {low} and at most {high}" if above_low else f"from {low} to {high}"
        raise InputError(f"{name} must be {wanted}, got {shown(value)}")


def check_switch(name: str, value: object) -> None:
    """Raise InputError where value is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {shown(value)}")


def shown(value: object) -> str:
    """The value as a message shows it, cut short."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes out no number of more than some thousand digits
        return "a number too long to show"
