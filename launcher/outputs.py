"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.coordinator.events import RequestTimings
from paceline.coordinator.messages import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every generated token, the one that ended the answer included."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token where SamplingParams.logprobs asked."""
    finish_reason: str | None = None
    """`stop` (an end id or a stop text), `length`, `abort`, or `error` (its grammar could not be followed)."""
    stop_reason: int | str | None = None
    """The stop text or stop_token_ids entry that ended it; None for the model's own end or the length."""
    timings: RequestTimings | None = None
    error: str = ""
    """What went wrong, where finish_reason is `error`."""


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt, as `LLM.generate` returns them."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a token of the prompt where SamplingParams.prompt_logprobs asked; the first token's is None."""

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """News of one answer, as `LLM.stream` yields them."""

    prompt_index: int
    index: int
    """Which of the prompt's n answers."""
    text: str
    """New text; the join of all chunks is the answer's text."""
    token_ids: Sequence[int]
    finish_reason: str | None
