"""What an answer is made of, in the order in which it was said; texts come in pieces whose join is the whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool begins."""

    index: int
    """Of the call in its answer, from 0."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | Call | Arguments
