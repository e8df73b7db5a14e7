"""What operators watch, in Prometheus' text format at /metrics.

Of the HTTP side, each answer (choice) counted once:

    paceline_time_to_first_token_seconds      histogram: from the request's arrival to the answer's first token
    paceline_inter_token_seconds              histogram: between two tokens of an answer; tokens that come together
                                              share the time since the ones before
    paceline_answer_seconds                   histogram: from the request's arrival to the answer's end
    paceline_queue_seconds                    histogram: from the engine's taking a request to its first step
    paceline_answers_total{finish_reason}     stop, length, tool_calls, or abort: the client left, it ran
                                              out of time, or it failed
    paceline_accepted_answers                 accepted and not yet finished
    paceline_http_responses_total{path,status}    path is "other" where it is none of this server's; status 499 is a
                                              client that left before its answer began

Of the engine, at the moment of the scrape, missing until it is ready and once it is gone:

    paceline_requests_running, paceline_requests_waiting
    paceline_cache_blocks{state}              free, cached (free, and findable by their prefix), used
    paceline_cache_usage_ratio                used blocks / all blocks
    paceline_prompt_tokens_total              of the answers admitted; n answers to a prompt count it n times
    paceline_cached_prompt_tokens_total       how many of these were found in the prefix cache
    paceline_prefix_cache_hit_ratio           their share, since the start
    paceline_generated_tokens_total, paceline_preemptions_total, paceline_steps_total
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.coordinator.events import CoordinatorStats, RequestTimings

_WAITS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_WAITS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_ANSWERS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class ServerMetrics:
    """All numbers of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineNumbers()
        self._registry.register(self._engine)
        own = self._registry
        self.first_token = Histogram(
            "paceline_time_to_first_token_seconds", "Arrival to first token", buckets=_WAITS, registry=own
        )
        self.inter_token = Histogram(
            "paceline_inter_token_seconds", "Between two tokens of an answer", buckets=_TOKEN_WAITS, registry=own
        )
        self.answer = Histogram("paceline_answer_seconds", "Arrival to end", buckets=_ANSWERS, registry=own)
        self.queue = Histogram("paceline_queue_seconds", "Engine's queue", buckets=_WAITS, registry=own)
        self.answers = Counter("paceline_answers", "Answers ended", ("finish_reason",), registry=own)
        self.accepted = Gauge("paceline_accepted_answers", "Answers accepted and not yet finished", registry=own)
        self.responses = Counter("paceline_http_responses", "HTTP responses", ("path", "status"), registry=own)

    def watch_answer(self, arrived: float) -> AnswerWatch:
        """Follow an answer whose request arrived at this moment of time.monotonic()."""
        return AnswerWatch(self, arrived)

    def text(self, stats: CoordinatorStats | None) -> bytes:
        """Everything in Prometheus' text format; stats: the engine's numbers of now, None where there are none."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class AnswerWatch:
    """Measures one answer."""

    def __init__(self, metrics: ServerMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last: float | None = None
        self._reason = "abort"

    def tokens(self, count: int) -> None:
        """So many tokens came just now."""
        if count == 0:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrived)
            count -= 1
            self._last = now
        for _ in range(count):
            self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str, timings: RequestTimings | None) -> None:
        """The engine has ended the answer."""
        self._reason = reason
        if timings is not None and timings.first_scheduled is not None:
            self._metrics.queue.observe(timings.first_scheduled - timings.arrived)

    def close(self) -> None:
        """Count the answer, as aborted unless it had finished."""
        self._metrics.answers.labels(self._reason).inc()
        self._metrics.answer.observe(time.monotonic() - self._arrived)


class _EngineNumbers:
    """The engine's own numbers, as its last stats had them."""

    def __init__(self) -> None:
        self.stats: CoordinatorStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        blocks = {state: getattr(stats.blocks, state) for state in ("free", "cached", "used")}
        states = GaugeMetricFamily("paceline_cache_blocks", "Cache blocks by state", labels=("state",))
        for state, count in blocks.items():
            states.add_metric((state,), count)
        yield states
        hits = stats.cached_prompt_tokens / max(stats.prompt_tokens, 1)
        for name, value in (
            ("requests_running", stats.running),
            ("requests_waiting", stats.waiting),
            ("cache_usage_ratio", blocks["used"] / max(sum(blocks.values()), 1)),
            ("prefix_cache_hit_ratio", hits),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", name.replace("_", " "), value=value)
        for name in ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions", "steps"):
            yield CounterMetricFamily(f"paceline_{name}", name.replace("_", " "), value=getattr(stats, name))
