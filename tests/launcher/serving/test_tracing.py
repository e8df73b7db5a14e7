"""Traces of requests, as a collector gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from paceline.coordinator.errors import InputError
from paceline.launcher.serving import tracing
from paceline.launcher.serving.settings import ServerSettings

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "a secret question"}]
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP; answers 503 while it is broken."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.broken = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered = 0
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

    @property
    def resources(self) -> list[Any]:
        return [each for body in self.bodies for each in ExportTraceServiceRequest.FromString(body).resource_spans]

    def spans(self) -> list[Any]:
        return [span for resource in self.resources for scope in resource.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.server.may_answer.wait(10)
        self.server.answered += 1
        self.send_response(503 if self.server.broken else 200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")
    monkeypatch.setattr(tracing, "FAREWELL_SECONDS", 60.0)
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(holder: Any) -> dict[str, Any]:
    """A span's or a resource's, as Python values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: plain(each.value) for each in holder.attributes}


async def test_a_request_is_a_span_with_its_phases(serve: Any, collector: Collector) -> None:
    served = serve(otlp_endpoint=collector.url)
    tell = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    async with served.app.router.lifespan_context(served.app), served.http() as client:
        body = {"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "seed": 3, "n": 2, "stream": True}
        served.engine.script = served.ids("a long answer that goes on for more than five tokens " * 3)
        answer = await client.post("/v1/chat/completions", json=body, headers=tell)
        for path in ("/health", "/metrics", "/v1/models"):
            await client.get(path, headers=tell)
    assert answer.status_code == 200
    assert set(collector.paths) == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans()}
    assert list(spans) == ["queue", "prefill", "decode", "chat smol"]
    request = spans.pop("chat smol")
    assert (request.trace_id.hex(), request.parent_span_id.hex(), request.kind) == (TRACE_ID, PARENT_ID, 2)
    prompt_tokens = len(served.tokenizer.encode_chat(HELLO))
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "smol",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": prompt_tokens // 2,
        "gen_ai.usage.output_tokens": 10,
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "paceline.request_id": "mine",
    }
    got = attributes(request)
    assert {name: got.get(name) for name in expected} == expected
    assert got["gen_ai.response.id"].startswith("chatcmpl-")
    assert "error.type" not in got
    assert abs(request.start_time_unix_nano - time.time_ns()) < 60e9
    assert request.end_time_unix_nano > request.start_time_unix_nano
    # The engine of these tests says that each of its requests came at 0 s, began at 0.01, and had tokens at 0.02.
    lengths = [span.end_time_unix_nano - span.start_time_unix_nano for span in spans.values()]
    assert lengths == [10_000_000, 10_000_000, 980_000_000]
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert {(span.trace_id.hex(), span.parent_span_id) for span in spans.values()} == {(TRACE_ID, request.span_id)}
    assert attributes(collector.resources[0].resource)["service.name"] == "paceline"
    assert b"secret" not in b"".join(collector.bodies)


async def test_a_span_names_the_model_as_its_client_did(serve: Any, collector: Collector) -> None:
    served = serve(otlp_endpoint=collector.url)
    async with served.app.router.lifespan_context(served.app), served.http() as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
        ):
            for model in ("alias", "smol", "secret"):
                await client.post(path, json=body | {"model": model})
        await client.post("/v1/completions", json={"prompt": "hi", "model": "alias", "top_p": 2})
    spans = [span for span in collector.spans() if span.name not in ("queue", "prefill", "decode")]
    names = [*["alias", "smol", "smol"] * 3, "alias"]
    assert [span.name.split()[1] for span in spans] == names
    assert [attributes(span)["gen_ai.request.model"] for span in spans] == names
    assert {attributes(span)["gen_ai.response.model"] for span in spans} == {"smol"}
    assert b"secret" not in b"".join(collector.bodies)


async def test_errors_and_the_clients_wish_not_to_be_traced(
    serve: Any, collector: Collector, pass_seconds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.serving")
    served = serve(otlp_endpoint=f"{collector.url}/v1/traces", request_timeout=600)
    async with served.app.router.lifespan_context(served.app), served.http() as client:
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        assert (await client.post("/v1/completions", json={"prompt": "hi"}, headers=unsampled)).status_code == 200
        nonsense = {"traceparent": "é".encode(), "tracestate": b"\xff=,,"}
        await client.post("/v1/completions", json={"prompt": "hi", "top_p": 2}, headers=nonsense)
        served.engine.gate.clear()
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        pass_seconds(600)
        await asking
    assert set(collector.paths) == {"/v1/traces"}
    spans = collector.spans()
    got = [(span.name, attributes(span).get("error.type"), span.status.code) for span in spans]
    assert got == [
        ("text_completion smol", "invalid_request_error", 0),
        ("text_completion smol", "request_timeout", 2),
    ]
    logged = [each.fields["trace_id"] for each in caplog.records if each.message == "request"]
    assert logged == [TRACE_ID, *(span.trace_id.hex() for span in spans)]


@pytest.mark.parametrize("listens", [True, False])
async def test_a_collector_that_fails_is_no_trouble_to_anybody(
    serve: Any,
    collector: Collector,
    listens: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector.broken = True
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")  # it tries again so long
    served = serve(otlp_endpoint=collector.url if listens else "http://127.0.0.1:9")
    async with served.app.router.lifespan_context(served.app), served.http() as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    assert "exporting spans batch" in caplog.text or "Failed to export" in caplog.text
    assert bool(collector.bodies) == listens


async def test_the_server_ends_though_its_collector_does_not_answer(
    serve: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FAREWELL_SECONDS", 0.05)
    collector.may_answer.clear()
    served = serve(otlp_endpoint=collector.url)
    async with served.app.router.lifespan_context(served.app), served.http() as client:
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    assert collector.answered == 0
    collector.may_answer.set()


@pytest.mark.parametrize("url", ["", "collector", "ftp://collector", "http://", "http://collector:port", 4318])
async def test_an_endpoint_that_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(InputError, match="otlp_endpoint must be a URL"):
        ServerSettings(model_names=("x",), otlp_endpoint=url)


async def test_nothing_of_it_is_loaded_unless_wanted_and_what_is_missing_is_named() -> None:
    code = """
import sys
import paceline.launcher.serving.app, paceline.launcher.serving.front_process
from paceline.launcher.__main__ import run
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
sys.modules["opentelemetry.exporter"] = None
sys.exit(run(["serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:4318"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"
    words = "paceline: --otlp-endpoint needs opentelemetry.exporter.otlp; install paceline[trace]\n"
    assert (result.returncode, result.stderr) == (2, words)
