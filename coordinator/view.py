"""What somebody who watches the engine sees of one moment: its requests, its blocks, its latest steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.coordinator.events import CoordinatorStats
from paceline.coordinator.request import Request, Status

MOST_WAITING_SHOWN = 64
"""A view shows so many of those that wait, the next ones first, so that taking it costs the same however many do."""
STEPS_REMEMBERED = 256


class StepLine(NamedTuple):
    """One step as it was planned."""

    step: int
    planned: float
    """Seconds on the coordinator's clock."""
    rows: int
    prompt_tokens: int
    """Tokens of prompts, and of what is computed again after a preemption."""
    decode_tokens: int
    """Tokens of running answers, one a row."""


class RequestLine(NamedTuple):
    """One request; its tokens themselves stay with the engine."""

    id: str
    slot: int
    """Its place in the batch; -1 while it waits."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache at its first admission."""
    computed_tokens: int
    """Prompt and answer tokens whose keys and values are in the cache, steps in flight included."""
    generated_tokens: int
    blocks: int
    seconds: float
    """Since it arrived."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """Everything at one moment. Nothing in it was written by a user."""

    taken: float
    """Seconds on the coordinator's clock."""
    stats: CoordinatorStats
    block_holders: array[int]
    """int32 for each block: FREE, CACHED, SHARED, or the slot of the one request that holds it."""
    requests: Sequence[RequestLine]
    """All that run, in order of rank, then the next MOST_WAITING_SHOWN that wait."""
    steps: Sequence[StepLine]
    """The last STEPS_REMEMBERED, oldest first."""


def line_of(request: Request, now: float) -> RequestLine:
    """What is shown of a request. Made without a loop over its tokens or blocks."""
    return RequestLine(
        request.id,
        request.slot if request.status is Status.RUNNING else -1,
        request.prompt_len,
        request.cached_tokens,
        request.num_computed,
        len(request.token_ids) - request.prompt_len,
        len(request.table.block_ids),
        now - request.arrived,
    )
