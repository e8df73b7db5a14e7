"""All numbers of a server in Prometheus' text format, each name and label as docs/metrics.md has it.

Where vLLM has a series of the same meaning, its name is taken with another prefix, so that its dashboards are easily
carried over. The format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline import __version__
from paceline.coordinator.distribution import Distribution
from paceline.coordinator.events import CoordinatorStats, RankState
from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.metrics import ServerMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Writes what operators scrape."""

    def __init__(self, metrics: ServerMetrics, admission: Admission, model_name: str) -> None:
        self._metrics = metrics
        self._admission = admission
        self._model_name = model_name
        self._process = ProcessCollector(registry=None)
        build = {
            "version": __version__,
            "python_version": platform.python_version(),
            "torch_version": importlib.metadata.version("torch"),
        }
        self._build_info = _info("build_info", "Versions of this server's parts", build)

    def text(self, info: EngineInfo | None, stats: CoordinatorStats | None) -> bytes:
        """Everything of now; stats: the engine's numbers, None where it is not ready, gone, or does not answer."""
        registry = CollectorRegistry()
        registry.register(_Families([*self._server(), *self._engine(info, stats)]))
        return generate_latest(registry)

    def _server(self) -> Iterator[Metric]:
        metrics, admission = self._metrics, self._admission
        yield self._build_info
        yield from self._process.collect()
        for name, text, distribution in (
            ("time_to_first_token_seconds", "Arrival of a request to an answer's first token", metrics.first_token),
            ("inter_token_latency_seconds", "Time between two tokens of an answer", metrics.inter_token),
            ("request_time_per_output_token_seconds", "Mean time a token after an answer's first", metrics.per_token),
            ("e2e_request_latency_seconds", "Arrival of a request to an answer's end", metrics.answer),
            ("request_queue_time_seconds", "Time in the engine's queue", metrics.queue),
            ("request_prefill_time_seconds", "First step to first token", metrics.prefill),
            ("request_decode_time_seconds", "First token to end", metrics.decode),
            ("request_prompt_tokens", "Tokens of an answer's prompt", metrics.prompt_tokens),
            ("request_generation_tokens", "Tokens of an answer", metrics.answer_tokens),
        ):
            yield _histogram(name, text, distribution)
        finished = [((reason,), count) for reason, count in metrics.finished.items()]
        yield _counters("request_success", "Answers ended", ("finished_reason",), finished)
        errors = [((code,), count) for code, count in metrics.errors.items()]
        yield _counters("request_errors", "Requests ended by an error", ("code",), errors)
        responses = [((path, str(status)), count) for (path, status), count in metrics.responses.items()]
        yield _counters("http_responses", "HTTP responses", ("path", "status"), responses)
        yield _gauge("accepted_answers", "Answers accepted and not yet finished", admission.accepted)
        yield _gauge("accepted_answers_limit", "Most answers that are accepted at once", admission.limit)

    def _engine(self, info: EngineInfo | None, stats: CoordinatorStats | None) -> Iterator[Metric]:
        yield _gauge("engine_up", "Whether the engine has given the numbers of this scrape", int(stats is not None))
        if info is None or stats is None:
            return
        model = {
            "model_name": self._model_name,
            "max_model_len": str(info.max_model_len),
            "block_size": str(info.block_size),
            "num_blocks": str(info.num_blocks),
            "tensor_parallel_size": str(info.tensor_parallel_size),
        }
        yield _info("model_info", "The model and its cache", model)
        blocks = stats.blocks
        all_blocks = max(blocks.free + blocks.cached + blocks.used, 1)
        yield _gauge("num_requests_running", "Answers that have a place in the batch", stats.running)
        yield _gauge("num_requests_waiting", "Answers that wait for one", stats.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1", blocks.used / all_blocks)
        states = [((state,), getattr(blocks, state)) for state in ("free", "cached", "used")]
        yield _gauges("kv_cache_blocks", "Cache blocks by state", ("state",), states)
        for name, text, count in (
            ("prompt_tokens", "Tokens of the prompts admitted", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found there", stats.cached_prompt_tokens),
            ("num_preemptions", "Times that a request lost its blocks to others", stats.preemptions),
        ):
            yield _counters(name, text, (), [((), count)])
        yield _histogram("iteration_tokens_total", "Tokens computed in a step", stats.step_tokens)
        yield _histogram("iteration_requests", "Requests in a step", stats.step_requests)
        yield _histograms("step_time_seconds", "Rank 0's time by part of a step", "part", stats.step_seconds)
        yield from _ranks(stats.ranks)


class _Families(Collector):
    """What generate_latest takes its metrics from."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _ranks(ranks: Sequence[RankState]) -> Iterator[Metric]:
    memory = [
        ((str(each.rank), kind), size)
        for each in ranks
        for kind, size in (
            ("weights", each.weights_bytes),
            ("cache", each.cache_bytes),
            ("workspace", each.workspace_bytes),
        )
    ]
    yield _gauges("rank_memory_bytes", "Memory set aside since the start", ("rank", "kind"), memory)
    for name, text, field in (
        ("rank_device_memory_bytes", "Memory of the rank's device", "memory_total"),
        ("rank_device_memory_used_bytes", "Memory in use there", "memory_used"),
        ("rank_heartbeat_age_seconds", "Time since the rank's last sign of life", "silence"),
    ):
        yield _gauges(name, text, ("rank",), [((str(each.rank),), getattr(each, field)) for each in ranks])
    yield _counters(
        "rank_steps", "Steps taken by the rank", ("rank",), [((str(each.rank),), each.steps) for each in ranks]
    )


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each under the values of its labels."""


def _gauges(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"paceline_{name}", text, labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    return _gauges(name, text, tuple(labels), [(tuple(labels.values()), 1)])


def _counters(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = CounterMetricFamily(f"paceline_{name}", text, labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family


def _histograms(name: str, text: str, label: str, distributions: Mapping[str, Distribution]) -> Metric:
    family = HistogramMetricFamily(f"paceline_{name}", text, labels=(label,))
    for value, distribution in distributions.items():
        family.add_metric((value,), _buckets(distribution), distribution.sum)
    return family


def _histogram(name: str, text: str, distribution: Distribution) -> Metric:
    family = HistogramMetricFamily(f"paceline_{name}", text)
    family.add_metric((), _buckets(distribution), distribution.sum)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Observations up to each bound: Prometheus counts them in all buckets that they fit."""
    bounds = [*(repr(float(bound)) for bound in distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
