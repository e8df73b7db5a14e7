"""A trace of each request for text, sent to an OpenTelemetry collector. Imported only where one is named.

A server span for the request with the attributes of the conventions for generative AI, and under it a span for each
phase: queue, prefill, decode. All are made once the request has ended, from the times that were taken on the way, so
that a running request pays nothing. Nothing that a client wrote is in them but the id of its request and, where it is
a served one, the model's name.

https://github.com/open-telemetry/semantic-conventions/blob/main/docs/gen-ai/gen-ai-spans.md
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline import __version__
from paceline.coordinator.events import RequestTimings
from paceline.launcher.serving.answers import Answers
from paceline.launcher.serving.record import RequestRecord

TRACES_PATH = "/v1/traces"
FAREWELL_SECONDS = 2.0
"""At the end of the server, for sending what was not sent yet."""

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}

_Value = str | int | float | Sequence[str]


class Tracing:
    """Makes traces, and has a thread of its own send them. Where the collector fails they are lost; the log says so."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """endpoint: the collector's URL for OTLP over HTTP, with or without TRACES_PATH; model_name: the one that
        answers carry.

        OpenTelemetry's own variables have their say in all else: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
        OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, …
        """
        self._model_name = model_name
        own = {"service.name": "paceline", "service.version": __version__}
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        # Its own end, at exit, could take half a minute.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        url = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(url if url.endswith(TRACES_PATH) else url + TRACES_PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> str | None:
        """Trace a request that has just ended; the id of its trace, None for requests that are not for text.

        headers: the request's; a W3C traceparent among them makes this a part of the client's trace.
        """
        operation = _OPERATIONS.get(record.path)
        if operation is None or record.method != "POST":
            return None
        names = ("traceparent", "tracestate")
        carrier = {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}
        to_unix = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{operation} {record.model or self._model_name}",
            self._propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            self._request_attributes(record, operation),
            start_time=_nanoseconds(record.started) + to_unix,
        )
        if span.is_recording():
            if record.answers is not None:
                span.set_attributes(_answer_attributes(record.answers))
                self._add_phases(span, record.answers.timings, to_unix)
            if record.error is not None:
                span.set_attribute("error.type", record.error.reason)
                if record.error.status >= 500:
                    span.set_status(Status(StatusCode.ERROR, record.error.message))
        span.end()
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for FAREWELL_SECONDS at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(FAREWELL_SECONDS)

    def _request_attributes(self, record: RequestRecord, operation: str) -> dict[str, _Value]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": record.model or self._model_name,
            "gen_ai.response.model": self._model_name,
            "http.request.method": record.method,
            "url.path": record.path,
            "http.response.status_code": record.status,
            "paceline.request_id": record.request_id,
        }

    def _add_phases(self, span: Span, timings: Sequence[RequestTimings], to_unix: int) -> None:
        """What the client has felt of several choices: each phase until the first of them has passed it, and the end of
        the last."""
        starts = [each.first_scheduled for each in timings if each.first_scheduled is not None]
        tokens = [each.first_token for each in timings if each.first_token is not None]
        if not starts or not tokens:
            return
        arrived, finished = min(each.arrived for each in timings), max(each.finished for each in timings)
        moments = [_nanoseconds(moment) + to_unix for moment in (arrived, min(starts), min(tokens), finished)]
        context = set_span_in_context(span)
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            self._tracer.start_span(name, context, start_time=start).end(end)


def _answer_attributes(answers: Answers) -> dict[str, _Value]:
    params = answers.params
    attributes: dict[str, _Value] = {
        "gen_ai.response.id": answers.answer_id,
        "gen_ai.response.finish_reasons": answers.finish_reasons,
        "gen_ai.usage.input_tokens": answers.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": answers.cached_tokens,
        "gen_ai.usage.output_tokens": answers.completion_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": float(params.top_k),
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty),
        "gen_ai.request.presence_penalty": float(params.presence_penalty),
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if answers.count != 1:
        attributes["gen_ai.request.choice.count"] = answers.count
    return attributes


def _nanoseconds(moment: float) -> int:
    return round(moment * 1e9)
