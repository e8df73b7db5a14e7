"""What is counted and timed of HTTP requests and their answers; exposition.py writes it out."""

from __future__ import annotations

import time
from collections import Counter

from paceline.coordinator.distribution import Distribution
from paceline.coordinator.events import RequestTimings
from paceline.launcher.serving.record import RequestRecord

FINISHED_REASONS = ("stop", "length", "abort")
EXPECTED_ERRORS = ("client_gone", "queue_full", "request_timeout")
"""Codes that are there with 0 from the start, so that their rates can be watched; others come with the first."""

# Steps of about half again, so that a percentile is known to that much, from a small model on a GPU to a CPU in need.
_WAITS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120),
)
_TOKEN_WAITS = (
    *(0.0002, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10),
)
_ANSWERS = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 45),
    *(60, 90, 120, 300, 600, 1800),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)


class ServerMetrics:
    """All numbers of one server's HTTP side. Used from one event loop."""

    def __init__(self) -> None:
        self.first_token = Distribution(_WAITS)
        """Seconds from a request's arrival to an answer's first token."""
        self.inter_token = Distribution(_TOKEN_WAITS)
        """Seconds between two tokens of an answer; tokens that come together share the time since those before."""
        self.per_token = Distribution(_TOKEN_WAITS)
        """An answer's mean seconds a token after its first one."""
        self.answer = Distribution(_ANSWERS)
        """Seconds from a request's arrival to an answer's end, of those that were finished."""
        self.queue = Distribution(_WAITS)
        """Seconds from the engine's taking a request to its first step."""
        self.prefill = Distribution(_WAITS)
        """Seconds from its first step to its first token."""
        self.decode = Distribution(_ANSWERS)
        """Seconds from its first token to its end."""
        self.prompt_tokens = Distribution(_TOKENS)
        """Tokens of an answer's prompt."""
        self.answer_tokens = Distribution(_TOKENS)
        """Tokens of an answer."""
        self.finished = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        """Answers ended, by reason."""
        self.errors = Counter(dict.fromkeys(EXPECTED_ERRORS, 0))
        """Requests ended by an error, by its code."""
        self.responses: Counter[tuple[str, int]] = Counter()
        """Responses by path and status."""

    def watch_answer(self, arrived: float, prompt_tokens: int) -> AnswerWatch:
        """Follow an answer whose request arrived at this moment of time.monotonic()."""
        return AnswerWatch(self, arrived, prompt_tokens)

    def count_request(self, record: RequestRecord, path: str) -> None:
        """Count an HTTP request that has ended; path: what it is to be counted under."""
        self.responses[path, record.status] += 1
        if record.error is not None:
            self.errors[record.error.reason] += 1


class AnswerWatch:
    """Measures one answer."""

    __slots__ = ("_arrived", "_last", "_metrics", "_prompt_tokens", "_reason", "_tokens")

    def __init__(self, metrics: ServerMetrics, arrived: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._last = 0.0
        self._reason = "abort"

    def tokens(self, count: int) -> None:
        """So many tokens came just now."""
        if count == 0:
            return
        now = time.monotonic()
        further = count
        if self._tokens == 0:
            self._metrics.first_token.add(now - self._arrived)
            self._last = now
            further -= 1
        if further:
            self._metrics.inter_token.add((now - self._last) / further, further)
        self._tokens += count
        self._last = now

    def finished(self, reason: str, timings: RequestTimings | None) -> None:
        """The engine has ended the answer."""
        self._reason = reason
        self._metrics.prompt_tokens.add(self._prompt_tokens)
        self._metrics.answer_tokens.add(self._tokens)
        if timings is None or timings.first_scheduled is None or timings.first_token is None:
            return
        self._metrics.queue.add(timings.first_scheduled - timings.arrived)
        self._metrics.prefill.add(timings.first_token - timings.first_scheduled)
        decode = timings.finished - timings.first_token
        self._metrics.decode.add(decode)
        if self._tokens > 1:
            self._metrics.per_token.add(decode / (self._tokens - 1))

    def close(self) -> None:
        """Count the answer, as aborted unless it had finished."""
        self._metrics.finished[self._reason] += 1
        if self._reason != "abort":
            self._metrics.answer.add(time.monotonic() - self._arrived)
