"""What every request passes: keys, size, origin (field report B57), and what is written down about it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from paceline.launcher.json_log import JsonFormatter

pytestmark = pytest.mark.anyio

KEY = "sk-right"
HELLO = [{"role": "user", "content": "a secret question"}]
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/smol"),
    ("GET", "/v1/load"),
    ("GET", "/v1/engine"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
    ("GET", "//v1/models"),
    ("GET", "/V1/models"),
    ("GET", "//health"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_route_is_open_without_a_key(serve: Any, method: str, path: str) -> None:
    served = serve(api_keys=("sk-other", KEY))
    async with served.http() as client:
        for header in (None, "Bearer sk-wrong", KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY}x", "Bearer é"):
            headers = {} if header is None else {"authorization": header.encode()}
            answer = await client.request(
                method, f"http://server{path}", headers=headers, params={"api_key": KEY}, json={}
            )
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for header in (f"Bearer {KEY}", f"bearer {KEY}", "Bearer sk-other"):
            answer = await client.request(method, f"http://server{path}", headers={"authorization": header})
            assert answer.status_code != 401


async def test_these_are_all_routes(served: Any) -> None:
    listed = {path for _, path in ROUTES} | {"/health", "/ready", "/v1/models/{name}"}
    assert served.app.openapi()["paths"].keys() <= listed


async def test_whoever_watches_the_process_needs_no_key(serve: Any) -> None:
    served = serve(api_keys=(KEY,))
    async with served.http() as client:
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
    answer = await served.openai().chat.completions.create(model="smol", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    with pytest.raises(openai.AuthenticationError):
        await served.openai().with_options(api_key="sk-wrong").models.list()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Any) -> None:
    served = serve(body_limit=1000)
    sent = 0

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        for _ in range(100):
            sent += 100
            yield b"x" * 100

    async with served.http(headers={"content-type": "application/json"}) as client:
        exact = json.dumps({"prompt": "x"}).encode()
        assert (await client.post("/tokenize", content=exact + b" " * (1000 - len(exact)))).status_code == 200
        for content in (exact + b" " * (1001 - len(exact)), pieces()):  # with its length and without
            answer = await client.post("/tokenize", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
    assert sent == 1100


async def test_no_origin_is_let_in_unless_told(serve: Any) -> None:
    page = {"origin": "https://page.example"}
    ask = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serve(api_keys=(KEY,)).http() as client:
        answers = [await client.options("/v1/models", headers=ask), await client.get("/v1/models", headers=page)]
        assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
    async with serve(api_keys=(KEY,), cors_origins=("https://page.example",)).http() as client:
        preflight = await client.options("/v1/chat/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        refusal = await client.get("/v1/models", headers=page)
        body = {"messages": HELLO, "stream": True}
        right = page | {"authorization": f"Bearer {KEY}"}
        stream = await client.post("/v1/chat/completions", json=body, headers=right)
        for answer, status in ((preflight, 200), (refusal, 401), (stream, 200)):
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
        stranger = await client.get("/v1/models", headers=right | {"origin": "https://else.example"})
        assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("kind", [None, "", "text/plain", "text/plain;application/json", "multipart/form-data"])
@pytest.mark.parametrize("path", [path for method, path in ROUTES if method == "POST"])
async def test_a_body_that_browsers_send_anywhere_is_refused(served: Any, path: str, kind: str | None) -> None:
    """Any page may send these without asking first; a Blob without a type even has no content-type."""
    body = {"prompt": "x", "messages": HELLO, "input": "x", "tokens": [1]}
    field = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/detokenize": "tokens"}.get(path, "prompt")
    content = json.dumps({field: body[field]})
    async with served.http() as client:
        headers = {"origin": "https://page.example"} | ({} if kind is None else {"content-type": kind})
        refused = await client.post(path, content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
        assert served.engine.submitted == []
        assert (await client.post(path, content=content, headers={"content-type": "application/json"})).is_success


async def test_probes_may_ask_for_the_head_alone(served: Any, on_a_socket: Any) -> None:
    async with on_a_socket(served.app) as address, httpx.AsyncClient(base_url=address) as client:
        for status in (200, 503):
            for path in ("/health", "/ready"):
                whole, head = await client.get(path), await client.head(path)
                assert (whole.status_code, head.status_code) == (status, status)
                assert (head.content, head.headers["content-type"]) == (b"", whole.headers["content-type"])
            served.engine.failure = "broken"
        assert (await client.head("/v1/models")).status_code == 405


async def test_request_ids_are_kept_or_made(served: Any) -> None:
    async with served.http() as client:
        assert (await client.get("/health", headers={"x-request-id": "abc-1.2"})).headers["x-request-id"] == "abc-1.2"
        made = [
            (await client.get("/no", headers=headers)).headers["x-request-id"]
            for headers in ({}, {"x-request-id": "two words"}, {"x-request-id": "x" * 200})
        ]
    assert len(set(made)) == 3
    assert all(len(each) == 32 for each in made)


async def test_a_log_line_tells_all_but_what_was_written(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.serving")
    for log_prompts in (False, True):
        caplog.clear()
        served = serve(log_prompts=log_prompts, api_keys=(KEY,))
        served.engine.script = served.ids("a secret answer")
        async with served.http(headers={"authorization": f"Bearer {KEY}", "x-request-id": "mine"}) as client:
            await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": log_prompts, "n": 2})
            await client.post("/v1/completions", json={"prompt": "a secret question", "top_p": 3})
            for path in ("/health", "/ready", "/metrics", "/v1/load"):
                await client.get(path)  # good answers to machines that ask all the time are no news
            await client.get("/v1/models")
            served.engine.failure = "broken"
            await client.get("/health")
        lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        assert {(line["event"], line["level"]) for line in lines} == {("request", "info")}
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
        assert [(line["status"], line["path"], line["request_id"]) for line in lines] == [
            (200, "/v1/chat/completions", "mine"),
            (400, "/v1/completions", "mine"),
            (200, "/v1/models", "mine"),
            (503, "/health", "mine"),
        ]
        assert lines[0]["finish_reasons"] == ["stop", "stop"]
        assert lines[0]["completion_tokens"] == 2 * (len(served.engine.script) + 1)
        assert lines[0]["prompt_tokens"] == len(served.tokenizer.encode_chat(HELLO))
        assert "top_p" in lines[1]["error"]
        written = json.dumps(lines)
        assert "secret answer" not in written
        assert KEY not in written
        assert "secret question" not in written  # the chat's is there as token ids, the refused one not at all
        assert lines[0].get("prompts") == ([served.tokenizer.encode_chat(HELLO)] if log_prompts else None)


async def test_what_breaks_is_in_the_log_under_the_request_id(
    served: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "submit", None)
    async with served.http(headers={"x-request-id": "mine"}) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 500
    assert "mine" in answer.json()["error"]["message"]
    assert "not callable" not in answer.text
    (line,) = [json.loads(JsonFormatter().format(each)) for each in caplog.records if each.levelno == logging.ERROR]
    assert (line["event"], line["request_id"]) == ("request_failed", "mine")
    assert "not callable" in line["exception"]
