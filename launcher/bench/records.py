"""What happened to each request, written down as it happens."""

from __future__ import annotations

from array import array
from typing import Any

from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.clients.events import DONE, EventParser, event_object

NO_END = "stream ended early"
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class RequestRecord:
    """One request's times, in seconds after the start of the run, and token counts.

    Token counts are the server's own. With the usage so far in every event (vLLM's continuous_usage_stats) each event's
    tokens are known; else the tokens of the final usage are shared out evenly among the events that had text.
    """

    def __init__(self, plan: PlannedRequest) -> None:
        self.plan = plan
        self.sent: float | None = None
        self.ended: float | None = None
        """When the answer was there as a whole, or the request had failed."""
        self.error: str | None = None
        """In a few words, the same for the same cause."""
        self.times = array("d")
        """When each event with text came."""
        self.counts = array("I")
        """How many tokens each event stands for, as far as the server said."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False
        """Whether the stream came to its end."""
        self._counted = 0
        self._now = 0.0
        self._parser = EventParser(self._on_event)

    def feed(self, data: bytes, now: float) -> None:
        """Take what came of the stream now."""
        self._now = now
        self._parser.feed(data)

    def _on_event(self, data: bytes) -> None:
        if data == DONE:
            self.done = True
            return
        event = event_object(data)
        if event is None:
            self.error = self.error or "an event is no JSON object"
            return
        error = event.get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            self.error = self.error or f"error in the stream ({code or 'no code'})"
            return
        if usage := event.get("usage"):
            self._take_usage(usage)
        if any(map(_has_text, event.get("choices") or ())):
            self.times.append(self._now)
            known = self.completion_tokens
            self.counts.append(0 if known is None else max(0, known - self._counted))
            self._counted = known or 0

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens", self.cached_tokens)

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.done and self.error is None

    @property
    def tokens(self) -> int:
        """Output tokens that came: the usage's; events with text where there was none."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    @property
    def first(self) -> float | None:
        """When the first text came, or the end of an answer that had none; None where nothing came."""
        if self.times:
            return self.times[0]
        return self.ended if self.ok else None

    def token_counts(self) -> list[int]:
        """Tokens of each event with text."""
        if sum(self.counts):
            return list(self.counts)
        return even_shares(self.tokens, len(self.times))


def even_shares(total: int, parts: int) -> list[int]:
    """A whole number cut into so many whole parts that differ by no more than 1, larger ones first."""
    if parts == 0:
        return []
    share, rest = divmod(total, parts)
    return [share + (place < rest) for place in range(parts)]


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(map(delta.get, _TEXTS))
