"""What the coordinator reports: news of requests, and numbers about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.coordinator.block_manager import BlockUsage
from paceline.coordinator.distribution import Distribution
from paceline.coordinator.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Moments in a request's life, in seconds on the coordinator's clock; None where it did not get that far."""

    arrived: float
    first_scheduled: float | None
    first_token: float | None
    finished: float


@dataclass(slots=True)
class RequestEvent:
    """News of one request: new tokens, its end, or both. Every request has exactly one event with a finish_reason."""

    request_id: str
    token_ids: Sequence[int]
    """New output tokens; a stop token is among them."""
    logprobs: Sequence[TokenLogprobs]
    """Parallel to token_ids, or empty where none were asked for."""
    num_prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were found in the prefix cache; always fewer than num_prompt_tokens."""
    finish_reason: str | None = None
    """None while it goes on; `stop`: a stop token; `length`: max_tokens or the model's length; else what `abort` was
    given; `error`: its grammar could not be followed."""
    stop_token: int | None = None
    """The token id that ended it, where finish_reason is `stop`; None where a grammar has nothing to go on with."""
    timings: RequestTimings | None = None
    """On the last event only."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of all tokens of the prompt but the first, with the first news, where they were asked for."""
    error: str = ""
    """What went wrong, where finish_reason is `error`."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank: memory in bytes, and its latest sign of life."""

    rank: int
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    """All else that it has set aside for steps: activations, tables, CUDA graphs. This and the two above stay as they
    are once the engine has started."""
    memory_total: int
    """Of its device; on the CPU what the ranks of the host may use together."""
    memory_used: int
    """Of its device, by all; on the CPU by this rank's process. A second old at most, as long as it gives signs."""
    silence: float
    """Seconds since its last sign of life; 0 for rank 0, which tells this. A rank at rest gives one twice a second."""
    steps: int
    """Steps that it has been through: all that rank 0 has planned, but for those on their way to it."""


@dataclass(frozen=True, slots=True)
class CoordinatorStats:
    """Gauges of this moment, and counters since the start."""

    waiting: int
    running: int
    blocks: BlockUsage
    steps: int
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of the requests admitted so far, each request counted once."""
    cached_prompt_tokens: int
    """How many of these were found in the prefix cache."""
    generated_tokens: int
    finished: Mapping[str, int]
    """Requests ended, by finish_reason."""
    step_seconds: Mapping[str, Distribution]
    """The host's time by part of a step; see StepTimes."""
    step_requests: Distribution
    """Requests in a step."""
    step_tokens: Distribution
    """Tokens computed in a step."""
    ranks: Sequence[RankState]
    """In order."""
