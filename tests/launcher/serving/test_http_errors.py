"""What is wrong is said: the status, the field, in OpenAI's shape, and the engine never sees the request.

Field reports B30 (token ids) and B34 (numbers out of range) are among the cases.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import openai
import pytest

from paceline.coordinator.errors import InputError

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has the same four fields whatever is wrong."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    for trace in ("Traceback", "Error(", "pydantic", ".py"):
        assert trace not in answer.text
    return dict(body["error"])


BOTH = [
    ("top_k", -5),
    ("top_k", 0.01),
    ("top_k", 2**31),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": math.inf}),
    ("logit_bias", {"5": -101}),
    ("logit_bias", [1]),
    ("n", 0),
    ("n", -1),
    ("n", 5_000_000),
    ("n", True),
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", "1"),
    ("top_p", 1.01),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("seed", 2**70),
    ("seed", 1.5),
    ("stop", ["x"] * 10_000),
    ("stop", ""),
    ("stop", 5),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", "5"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**6),
    ("max_tokens", 2**40),
    ("min_tokens", -1),
    ("ignore_eos", "yes"),
    ("priority", 2**40),
    ("cache_salt", ""),
    ("stream_options", {"include_usage": True}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("best_of", 3),
    ("service_tier", "flex"),
    ("store", True),
    ("foo", 1),
    ("Temperature", 1),
    ("max_token", 5),
]
CHAT = [
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", "always"),
    ("functions", [TOOL]),
    ("function_call", {"name": "f"}),
    ("reasoning_effort", "high"),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("max_completion_tokens", 10**6),
    ("max_completion_tokens", -1),
    ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"chat_template": "x"}),
    ("chat_template_kwargs", {"messages": []}),
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].role", [{"role": "king", "content": "x"}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages[1].contents", [*HELLO, {"role": "user", "contents": "x"}]),
    ("messages[0].tool_calls[0].id", [{"role": "assistant", "content": "", "tool_calls": [TOOL]}]),
    ("messages[0].content", [{"role": "user", "content": "\ud800"}]),
    ("messages", [{"role": "user", "content": "many words " * 1000}]),
]
PLAIN = [
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", 10**9),
    ("suffix", "end"),
    ("echo", 1),
    ("prompt", None),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", "many words " * 1000),
    ("prompt", [5] * 512),
    ("prompt[1]", [1, 999_999_999]),
    ("prompt[0]", [-1]),
    ("prompt[0]", [49152]),
    ("prompt[0]", [1.5]),
    ("prompt[0]", [True]),
    ("prompt[1]", [1, "x"]),
    ("prompt[1]", ["x", 1]),
    ("prompt[1][0]", [[1], [49152]]),
    ("prompt[0]", [2**63]),
    ("prompt[0]", [None]),
]


def with_field(body: dict[str, Any], field: str, value: object) -> bytes:
    name = field.split("[")[0]
    body[name] = value
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/v1/chat/completions", *case) for case in BOTH + CHAT] + [("/v1/completions", *case) for case in BOTH + PLAIN],
    ids=lambda value: None if isinstance(value, str) and len(value) < 40 else repr(value)[:40],
)
async def test_a_bad_field_is_named(served: Any, path: str, field: str, value: object) -> None:
    body: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    async with served.http(headers={"content-type": "application/json"}) as client:
        answer = await client.post(path, content=with_field(body, field, value))
        assert error_of(answer, 400)["param"].split(".")[0] == field.split(".")[0]
        assert field.split("[")[0].split(".")[-1] in answer.text
        assert served.engine.submitted == []
        good = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
        assert (await client.post(path, json=good)).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"5", b'"x"', b"\xff\xfe{", b'{"prompt": "\xff"}', b'{"n": ' + b"9" * 6000 + b"}"]
)
async def test_what_is_no_json_object_is_a_400(served: Any, body: bytes) -> None:
    async with served.http(headers={"content-type": "application/json"}) as client:
        error_of(await client.post("/v1/completions", content=body), 400)


async def test_another_content_type_is_named(served: Any) -> None:
    async with served.http() as client:
        form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends by itself
        error = error_of(await client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=form), 400)
        assert "content-type: application/json" in error["message"]


async def test_deep_json_is_a_400(served: Any) -> None:
    async with served.http(headers={"content-type": "application/json"}) as client:
        deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        error_of(await client.post("/v1/completions", content=deep), 400)


async def test_the_openai_client_raises_its_own_errors(served: Any) -> None:
    client = served.openai()
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="smol", messages=HELLO, temperature=9000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


async def test_unknown_paths_and_methods(served: Any) -> None:
    async with served.http() as client:
        error_of(await client.get("/v1/nothing"), 404)
        error_of(await client.get("//v1/models"), 404)
        error_of(await client.get("/V1/models"), 404)
        error_of(await client.get("/v1/chat/completions"), 405)


async def test_a_missing_and_a_raising_template(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served.http() as client:
        for template, code in ((None, "no_chat_template"), ("{{ raise_exception('roles must alternate') }}", None)):
            monkeypatch.setattr(served.tokenizer.backend, "chat_template", template)
            error = error_of(await client.post("/v1/chat/completions", json={"messages": HELLO}), 400)
            assert (error["param"], error["code"]) == ("messages", code)
    assert "roles must alternate" in error["message"]


async def test_before_the_engine_is_ready_and_after_it_is_gone(served: Any) -> None:
    info, served.engine.info = served.engine.info, None
    async with served.http() as client:
        assert (await client.get("/health")).status_code == 200
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/tokenize", {"prompt": "x"})):
            answer = await client.post(path, json=body)
            assert error_of(answer, 503)["code"] == "not_ready"
            assert int(answer.headers["retry-after"]) >= 1
        error_of(await client.get("/ready"), 503)
        assert (await client.get("/metrics")).status_code == 200
        served.engine.info = info
        assert (await client.get("/ready")).status_code == 200
        served.engine.failure = "rank 3 died"
        for path in ("/ready", "/health", "/v1/load"):
            assert error_of(await client.get(path), 503)["code"] == "engine_failed"
        answer = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert "retry-after" in answer.headers
        error_of(answer, 503)
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_in_the_middle(served: Any, stream: bool) -> None:
    served.engine.script = served.ids("one two three four five six")
    served.engine.fails_after = 2
    body = {"messages": HELLO, "stream": stream}
    async with served.http() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    if not stream:
        error_of(answer, 503)
        return
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert "one" in events[0]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
    served.engine.failure = None
    served.engine.fails_after = served.engine.generated + 2
    with pytest.raises(openai.APIError):
        async for _ in await served.openai().chat.completions.create(model="smol", messages=HELLO, stream=True):
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_and_what_breaks(
    served: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def refuse(error: Exception) -> Any:
        raise error
        yield

    async with served.http() as client:
        for error, status in ((InputError("the prompt is cursed"), 400), (RuntimeError("secret /path.py"), 500)):
            monkeypatch.setattr(served.engine, "submit", lambda *_, error=error, **__: refuse(error))
            body = {"prompt": ["hi", "ho"], "stream": stream}
            told = error_of(await client.post("/v1/completions", json=body), status)
            assert "secret" not in told["message"]
    assert served.app.state.admission.accepted == 0


@pytest.mark.parametrize("line", [b"GET /%b HTTP/1.1" % (b"x" * 100_000), b"no HTTP at all"])
async def test_what_is_no_http_is_told_in_the_same_shape(served: Any, on_a_socket: Any, line: bytes) -> None:
    async with on_a_socket(served.app) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        writer.write(line + b"\r\nhost: localhost\r\n\r\n")
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    error = json.loads(content)["error"]
    assert (list(error), error["code"]) == (["message", "type", "param", "code"], "invalid_http")
