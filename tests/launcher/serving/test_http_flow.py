"""Requests that wait, are refused, take too long or are left: over a real socket where a client leaves."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hi"}]
ENDLESS = {"messages": HELLO, "ignore_eos": True}


async def until(condition: Any) -> None:
    """Wait until it holds, which it should soon."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("chunks", [0, 1, 3])
async def test_a_client_that_leaves_its_stream_frees_all_choices(served: Any, on_a_socket: Any, chunks: int) -> None:
    served.engine.token_seconds = 0.01
    if chunks == 0:
        served.engine.gate.clear()
    async with on_a_socket(served.app) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        body = json.dumps({**ENDLESS, "stream": True, "n": 3}).encode()
        lines = ("POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json")
        head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
        writer.write(head.encode() + body)
        for _ in range(chunks):
            await reader.readuntil(b"data: ")
        await until(lambda: len(served.engine.running) == 3)
        served.engine.gate.clear()  # nothing is written any more that could fail
        writer.close()
        await until(lambda: not served.engine.running)
        assert sorted(served.engine.aborted) == sorted(each[0] for each in served.engine.submitted)
        await until(lambda: served.app.state.admission.accepted == 0)


async def test_a_client_that_leaves_before_its_whole_answer(served: Any, on_a_socket: Any) -> None:
    served.engine.token_seconds = 0.02
    async with on_a_socket(served.app) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
        wish = {"prompt": ["one", "two"], "n": 2, "ignore_eos": True, "max_tokens": 400}
        task = asyncio.create_task(client.post("/v1/completions", json=wish))
        await until(lambda: len(served.engine.running) == 4)
        served.engine.gate.clear()
        task.cancel()
        await until(lambda: not served.engine.running)
        text = (await client.get("/metrics")).text
        assert 'paceline_request_success_total{finished_reason="abort"} 4.0' in text
        assert 'paceline_http_responses_total{path="/v1/completions",status="499"} 1.0' in text


async def test_clients_that_leave_at_random_leave_nothing_behind(served: Any, on_a_socket: Any) -> None:
    served.engine.token_seconds = 0.005
    rng = random.Random(7)

    async def client(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            for _ in range(4):
                body = {
                    **ENDLESS,
                    "max_tokens": rng.choice([2, 200]),
                    "stream": rng.random() < 0.5,
                    "n": rng.choice([1, 2]),
                }
                asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
                patience = served.engine.generated + rng.randint(0, 100)
                await until(lambda asking=asking, to=patience: asking.done() or served.engine.generated >= to)
                asking.cancel()
                (answer,) = await asyncio.gather(asking, return_exceptions=True)
                assert isinstance(answer, asyncio.CancelledError) or answer.status_code == 200

    async with on_a_socket(served.app) as address:
        await asyncio.gather(*(client(address) for _ in range(16)))
        await until(lambda: not served.engine.running and served.app.state.admission.accepted == 0)
        assert served.engine.aborted
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            assert (await http.post("/v1/chat/completions", json={"messages": HELLO})).status_code == 200


async def test_a_slow_reader_loses_nothing(served: Any, on_a_socket: Any) -> None:
    served.engine.script = served.ids("word " * 100)
    body = {"prompt": "x", "stream": True, "max_tokens": None, "n": 8}
    async with on_a_socket(served.app) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
        whole = (await client.post("/v1/completions", json=body | {"stream": False})).json()["choices"]
        texts = dict.fromkeys(range(8), "")
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await asyncio.sleep(0.5)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == [choice["text"] for choice in whole]


async def test_more_than_the_limit_is_told_to_come_back(serve: Any) -> None:
    served = serve(max_queue=3)
    served.engine.gate.clear()
    async with served.http() as client:
        waiting = [
            asyncio.create_task(client.post("/v1/chat/completions", json={"messages": HELLO, "n": n})) for n in (1, 2)
        ]
        await until(lambda: len(served.engine.running) == 3)
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/v1/load")).json()["accepted"] == 3
        for body, param in (({"prompt": "x", "n": 4}, "n"), ({"prompt": ["x"] * 4}, "prompt")):
            answer = await client.post("/v1/completions", json=body)  # would never fit
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        served.engine.gate.set()
        assert [(await task).status_code for task in waiting] == [200, 200]
        assert (await client.post("/v1/chat/completions", json={"messages": HELLO, "n": 3})).status_code == 200


async def test_while_it_shuts_down_accepted_requests_finish_and_new_ones_are_refused(served: Any) -> None:
    served.engine.gate.clear()
    async with served.http() as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": HELLO}))
        await until(lambda: served.engine.running)
        served.app.state.admission.close()
        for answer in (
            await client.post("/v1/chat/completions", json={"messages": HELLO}),
            await client.get("/ready"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in answer.headers
        assert (await client.get("/health")).status_code == 200
        served.engine.gate.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_past_its_time_ends_with_an_error(serve: Any, pass_seconds: Any, stream: bool) -> None:
    served = serve(request_timeout=600)
    body = {**ENDLESS, "stream": stream, "n": 2}
    async with served.http() as client:
        served.engine.gate.clear()
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: len(served.engine.running) == 2)
        pass_seconds(600)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        assert served.engine.running == {}
        served.engine.gate.set()
        served.engine.token_seconds = 0.01
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: served.engine.generated >= 10)
        pass_seconds(600)
        answer = await asking
        if stream:
            assert answer.status_code == 200
            events = answer.text.strip().split("\n\n")
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
        else:
            assert answer.status_code == 504
    assert served.engine.running == {}
    assert len(served.engine.aborted) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_server_ends_is_an_error(served: Any, stream: bool) -> None:
    served.engine.gate.clear()
    async with served.http() as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json={**ENDLESS, "stream": stream}))
        await until(lambda: served.engine.running)
        served.engine.abort(next(iter(served.engine.running)))
        served.engine.gate.set()
        answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
