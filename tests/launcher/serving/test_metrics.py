"""What /metrics says: what clients counted, what the documentation names, and what the dashboard shows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.launcher.serving import door
from paceline.launcher.serving.metrics import ServerMetrics

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
HELLO = [{"role": "user", "content": "hi"}]
DOCUMENTED = re.compile(r"\| `((?:paceline|process)_\w+)` \| (\w+) \| ([^|]*)\|")


def numbers(text: str) -> dict[str, float]:
    """Every sample by its name and labels as they are written, in the order of their names."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {}
    for sample in samples:
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
        found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    assert len(found) == len(samples), "a sample is there twice"
    return found


async def scrape(served: Any) -> str:
    async with served.http() as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text: str = answer.text
    return text


async def test_metrics_say_what_clients_counted(serve: Any, pass_seconds: Any) -> None:
    served = serve(max_queue=4, request_timeout=600)
    async with served.http() as client:

        async def ask(**fields: Any) -> Any:
            return await client.post("/v1/chat/completions", json={"messages": HELLO, **fields})

        answers = [(await ask(max_tokens=n, stop=stop)).json() for n, stop in ((1, None), (3, None), (100, "user"))]
        served.engine.tokens_at_once = 2
        answers.append((await ask(n=2)).json())
        await ask(top_p=2)
        await client.get("/nowhere")
        await client.get("/openapi.json")
        served.engine.gate.clear()
        waiting = [asyncio.create_task(ask(n=2)) for _ in range(2)]
        while len(served.engine.running) < 4:
            await asyncio.sleep(0.001)
        assert numbers(await scrape(served))["paceline_accepted_answers"] == 4
        assert (await ask()).status_code == 429
        pass_seconds(600)
        assert [(await task).status_code for task in waiting] == [504, 504]
        served.engine.gate.set()
        got = numbers(await scrape(served))
        served.engine.failure = "broken"
        assert (await ask()).status_code == 503
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    prompt = answers[0]["usage"]["prompt_tokens"]
    expected = {
        'paceline_request_success_total{finished_reason="length"}': 2,
        'paceline_request_success_total{finished_reason="stop"}': 3,
        'paceline_request_success_total{finished_reason="abort"}': 4,
        'paceline_request_errors_total{code="queue_full"}': 1,
        'paceline_request_errors_total{code="request_timeout"}': 2,
        'paceline_request_errors_total{code="client_gone"}': 0,
        'paceline_request_errors_total{code="invalid_request_error"}': 1,
        'paceline_request_errors_total{code="unknown_url"}': 1,
        'paceline_http_responses_total{path="/v1/chat/completions",status="200"}': 4,
        'paceline_http_responses_total{path="/v1/chat/completions",status="400"}': 1,
        'paceline_http_responses_total{path="/v1/chat/completions",status="429"}': 1,
        'paceline_http_responses_total{path="/v1/chat/completions",status="504"}': 2,
        'paceline_http_responses_total{path="other",status="404"}': 1,
        'paceline_http_responses_total{path="/openapi.json",status="200"}': 1,
        "paceline_time_to_first_token_seconds_count": 5,
        "paceline_inter_token_latency_seconds_count": tokens - 5,
        "paceline_e2e_request_latency_seconds_count": 5,
        "paceline_request_queue_time_seconds_count": 5,
        "paceline_request_queue_time_seconds_sum": 0.05,
        "paceline_request_prefill_time_seconds_sum": 0.05,
        "paceline_request_decode_time_seconds_sum": 5 * 0.98,
        "paceline_request_time_per_output_token_seconds_count": 4,
        "paceline_request_prompt_tokens_sum": 5 * prompt,
        "paceline_request_generation_tokens_sum": tokens,
        "paceline_accepted_answers": 0,
        "paceline_accepted_answers_limit": 4,
        # From here on what the engine has said.
        "paceline_engine_up": 1,
        "paceline_prompt_tokens_total": 9 * prompt,
        "paceline_prefix_cache_queries_total": 9 * prompt,
        "paceline_prefix_cache_hits_total": 9 * prompt // 2,
        "paceline_num_preemptions_total": 3,
        "paceline_num_requests_running": 0,
        'paceline_kv_cache_blocks{state="used"}': 4,
        "paceline_kv_cache_usage_perc": 4 / 1024,
        'paceline_step_time_seconds_bucket{le="0.0005",part="plan"}': 1,
        'paceline_step_time_seconds_bucket{le="0.005",part="plan"}': 2,
        'paceline_step_time_seconds_bucket{le="+Inf",part="plan"}': 2,
        'paceline_step_time_seconds_sum{part="plan"}': 0.0043,
        "paceline_iteration_tokens_total_sum": 64,
        "paceline_iteration_requests_count": 1,
        'paceline_rank_memory_bytes{kind="cache",rank="1"}': 2000,
        'paceline_rank_device_memory_bytes{rank="0"}': 9000,
        'paceline_rank_device_memory_used_bytes{rank="1"}': 4001,
        'paceline_rank_heartbeat_age_seconds{rank="1"}': 0.25,
        'paceline_rank_steps_total{rank="1"}': 6,
    }
    assert {name: got.get(name) for name in expected} == pytest.approx(expected)


async def test_without_an_engine_there_are_the_servers_own_numbers(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, served.engine.info = served.engine.info, None
    texts = [await scrape(served)]
    served.engine.info = info

    async def never() -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:  # ranks that wait for each other
        patch.setattr(door, "STATS_SECONDS", 0.01)
        patch.setattr(served.engine, "stats", never)
        texts.append(await scrape(served))
        async with served.http() as client:
            load = await client.get("/v1/load")
        assert (load.status_code, load.json()["error"]["code"]) == (503, "engine_silent")
    served.engine.failure = "broken"
    texts.append(await scrape(served))
    for text in texts:
        got = numbers(text)
        assert got["paceline_engine_up"] == 0
        assert got["paceline_accepted_answers"] == 0
        assert "paceline_num_requests_running" not in got


async def test_tokens_that_come_together_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("paceline.launcher.serving.metrics.time.monotonic", lambda: now)
    metrics = ServerMetrics()
    watch = metrics.watch_answer(100.0, 5)
    now = 101.0
    watch.tokens(3)
    now = 103.0
    watch.tokens(0)
    watch.tokens(4)
    assert (metrics.first_token.count, metrics.first_token.sum) == (1, 1)
    assert (metrics.inter_token.count, metrics.inter_token.sum) == (6, 2)


async def test_the_documentation_names_every_series(served: Any) -> None:
    documented = {
        (name.removesuffix("_total") if kind == "counter" else name, kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in DOCUMENTED.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    }
    async with served.http() as client:
        await client.post("/v1/completions", json={"prompt": "hi"})
    exposed = {
        (family.name, family.type, frozenset(family.samples[0].labels) - {"le"})
        for family in text_string_to_metric_families(await scrape(served))
    }
    assert exposed == documented


async def test_the_dashboard_shows_series_that_exist(served: Any) -> None:
    async with served.http() as client:
        await client.post("/v1/completions", json={"prompt": "hi"})
    samples = [sample for family in text_string_to_metric_families(await scrape(served)) for sample in family.samples]
    labels = {sample.name: set(sample.labels) | {"job", "instance"} for sample in samples}
    dashboard = json.loads((ROOT / "dashboards" / "paceline.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)
    expressions = [target["expr"] for target in targets]
    expressions += [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    shown = set()
    for expression in expressions:
        assert expression.count("(") == expression.count(")"), expression
        for name, selector in re.findall(r"\b((?:paceline|process)_\w+)(?:\{([^}]*)\})?", expression):
            assert name in labels, expression
            assert set(re.findall(r"(\w+)[!=]", selector)) <= labels[name], expression
            shown.add(name)
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            names = re.findall(r"\b(?:paceline|process)_\w+", expression)
            assert set(grouping.split(", ")) <= set.union(*(labels[name] for name in names)), expression
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels if name.startswith("paceline_")}
    left_out = families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert left_out == {"paceline_model_info", "paceline_request_decode_time_seconds"}
