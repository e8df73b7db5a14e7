"""Tools over HTTP, through OpenAI's own client: told to the model, called in its format, streamed as OpenAI streams."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
OSLO = '{"city": "Oslo {\\"}\\" 你好 🫠", "days": 2}'

HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
HERMES_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "get_weather", "parameters": {OSLO}}}'

CALLS = {"hermes": HERMES_CALL, "llama": LLAMA_CALL}
FORMS = [("hermes", "special"), ("hermes", "added"), ("hermes", "text"), ("llama", "special"), ("llama", "text")]


@pytest.fixture
def serve_tools(serve: Any, speak: Any, templates: dict[str, str]) -> Callable[..., Any]:
    """serve_tools(form, tags): a server of a model that writes calls in this form."""

    def make(form: str = "hermes", tags: str = "added", **settings: Any) -> Any:
        return serve(with_tokenizer=speak(templates[form], tags=tags), **settings)

    return make


async def ask(served: Any, text: str, *, stream: bool, **wishes: Any) -> list[dict[str, Any]]:
    """What each choice of the scripted answer holds, whether it was streamed or not."""
    served.engine.script = served.tokenizer.encode_rendered(text)
    wishes = {"model": "smol", "messages": HELLO, "tools": TOOLS} | wishes
    create = served.openai().chat.completions.create
    if not stream:
        answer = await create(**wishes)
        return [
            {
                "content": choice.message.content or "",
                "calls": [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
                "ids": len({call.id for call in choice.message.tool_calls or ()}),
                "finish_reason": choice.finish_reason,
            }
            for choice in answer.choices
        ]
    choices = [{"content": "", "calls": [], "ids": 0, "finish_reason": None} for _ in range(wishes.get("n", 1))]
    async for chunk in await create(**wishes, stream=True):
        for choice in chunk.choices:
            said: dict[str, Any] = choices[choice.index]
            assert said["finish_reason"] is None
            said["content"] += choice.delta.content or ""
            said["finish_reason"] = choice.finish_reason
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert (call.index, call.type) == (len(said["calls"]), "function")
                    assert call.id.startswith("call_")
                    said["calls"].append((call.function.name, ""))
                    said["ids"] += 1
                name, arguments = said["calls"][call.index]
                said["calls"][call.index] = (name, arguments + call.function.arguments)
    return choices


@pytest.mark.parametrize(("form", "tags"), FORMS)
async def test_a_call_reads_the_same_streamed_or_not(serve_tools: Any, form: str, tags: str) -> None:
    served = serve_tools(form, tags)
    expected = {"content": "", "calls": [("get_weather", OSLO)], "ids": 1, "finish_reason": "tool_calls"}
    for at_once in (1, 2, 7, 1000):
        served.engine.tokens_at_once = at_once
        for stream in (False, True):
            assert await ask(served, CALLS[form], stream=stream) == [expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [1, 3, 1000])
async def test_text_two_calls_and_text_that_looks_like_one(serve_tools: Any, stream: bool, at_once: int) -> None:
    served = serve_tools()
    served.engine.tokens_at_once = at_once
    text = f"Using <tool and <tool_calls>.\n\n{HERMES_CALL}\n{HERMES_TIME}"
    (said,) = await ask(served, text, stream=stream)
    assert said["content"] == "Using <tool and <tool_calls>."
    assert said["calls"] == [("get_weather", OSLO), ("time", "{}")]
    assert said["ids"] == 2
    (said,) = await ask(served, "No <tool, no call.", stream=stream)
    assert (said["content"], said["calls"], said["finish_reason"]) == ("No <tool, no call.", [], "stop")
    (said,) = await ask(served, HERMES_CALL.replace("get_weather", "get_whether"), stream=stream)
    assert said["content"] == HERMES_CALL.replace("get_weather", "get_whether")
    assert (said["calls"], said["finish_reason"]) == ([], "stop")


async def test_content_is_null_beside_calls_alone(serve_tools: Any) -> None:
    served = serve_tools()
    served.engine.script = served.tokenizer.encode_rendered(HERMES_CALL)
    answer = await served.openai().chat.completions.create(model="smol", messages=HELLO, tools=TOOLS)
    assert answer.choices[0].message.content is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_by_the_length_keeps_what_there_is(serve_tools: Any, stream: bool) -> None:
    served = serve_tools()
    tokens = len(served.tokenizer.encode_rendered(HERMES_CALL))
    arguments = set()
    for limit in range(1, tokens + 1):
        (said,) = await ask(served, HERMES_CALL, stream=stream, max_tokens=limit)
        assert said["finish_reason"] == "length"
        if said["calls"]:
            assert said["content"] == ""
            arguments.add(said["calls"][0][1])
            assert OSLO.startswith(said["calls"][0][1].rstrip("\ufffd"))
        else:
            assert HERMES_CALL.startswith(said["content"])
    assert OSLO in arguments
    assert len(arguments) > 5


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_with_the_first(serve_tools: Any, stream: bool) -> None:
    served = serve_tools()
    (said,) = await ask(served, HERMES_TIME + HERMES_CALL, stream=stream, parallel_tool_calls=False)
    assert (said["calls"], said["finish_reason"]) == ([("time", "{}")], "tool_calls")
    assert len(served.engine.aborted) == 1
    assert served.engine.generated < len(served.engine.script)
    assert served.app.state.admission.accepted == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_n_choices_has_its_own_calls(serve_tools: Any, stream: bool) -> None:
    served = serve_tools()
    # The echo engine begins choice i's script at its seed: one choice has two whole calls, others a torn one.
    choices = await ask(served, HERMES_CALL + HERMES_TIME, stream=stream, n=3, seed=0)
    assert choices[0]["calls"] == [("get_weather", OSLO), ("time", "{}")]
    assert all(choice["calls"] or choice["content"] for choice in choices)


async def test_logprobs_and_stop_texts_go_with_calls(serve_tools: Any) -> None:
    served = serve_tools()
    served.engine.script = served.tokenizer.encode_rendered(HERMES_CALL)
    wishes = {"model": "smol", "messages": HELLO, "tools": TOOLS, "logprobs": True}
    answer = await served.openai().chat.completions.create(**wishes)
    assert len(answer.choices[0].logprobs.content) == len(served.engine.script) + 1
    answer = await served.openai().chat.completions.create(**wishes, stop="days")
    choice = answer.choices[0]
    assert choice.message.tool_calls[0].function.arguments == OSLO.split("days")[0]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("tool_calls", "days")


@pytest.mark.parametrize("form", ["hermes", "llama"])
async def test_a_conversation_with_tools_reaches_the_template(serve_tools: Any, form: str) -> None:
    served = serve_tools(form)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": OSLO}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12 °C"}]},
    ]
    await served.openai().chat.completions.create(model="smol", messages=messages, tools=[TIME])
    prompt = served.tokenizer.backend.decode(served.engine.submitted[0][1])
    told = {"name": "time", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps({"type": "function", "function": told}) in prompt
    key = {"hermes": "arguments", "llama": "parameters"}[form]
    assert f'"{key}": {json.dumps(json.loads(OSLO), ensure_ascii=False)}}}' in prompt  # an object, not a quoted text
    assert "<|im_start|>tool\n12 °C<|im_end|>" in prompt


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ('{"city": ', '"{\\"city\\": "'), ("[1]", '"[1]"')])
async def test_a_broken_call_of_an_earlier_turn_is_shown_as_it_was(
    serve_tools: Any, arguments: str, shown: str
) -> None:
    served = serve_tools()
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    await served.openai().chat.completions.create(model="smol", messages=messages)
    assert f'"arguments": {shown}}}' in served.tokenizer.backend.decode(served.engine.submitted[0][1])


BAD_CITY = '{"city": 5}'


@pytest.mark.parametrize(("form", "tags"), FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_come_is_held_to_its_schema(
    serve_tools: Any, follows: Any, form: str, tags: str, choice: object
) -> None:
    served = serve_tools(form, tags)
    (said,) = await ask(served, CALLS[form], stream=True, tool_choice=choice)
    assert said["calls"] == [("get_weather", OSLO)]
    call = CALLS[form]
    followed = functools.partial(follows, served.tokenizer, served.engine.submitted[-1][2].grammar)
    assert followed(call)
    assert not followed("It rains.")
    assert not followed(call.replace(OSLO, BAD_CITY))
    assert followed(call.replace(OSLO, "{}").replace("get_weather", "time")) == (choice == "required")
    assert followed(f"{call}\n{call}") == (choice == "required" and form == "hermes")


@pytest.mark.parametrize(("form", "tags"), FORMS)
async def test_strict_functions_are_held_to_their_schemas_and_text_is_free(
    serve_tools: Any, follows: Any, form: str, tags: str
) -> None:
    served = serve_tools(form, tags)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await ask(served, "It rains.", stream=False, tools=[strict, TIME])
    call = CALLS[form]
    followed = functools.partial(follows, served.tokenizer, served.engine.submitted[-1][2].grammar)
    assert followed("It rains <tool {.")
    assert followed(call)
    assert followed(call.replace(OSLO, '{"x": 1}').replace("get_weather", "time"))
    assert not followed(call.replace(OSLO, BAD_CITY))
    assert not followed(call.replace("get_weather", "get_whether"))
    if form == "hermes":
        assert followed(f"Let me see.\n{call}\n{call}")
    await ask(served, "It rains.", stream=False)
    assert served.engine.submitted[-1][2].grammar is None


WRONG = [
    ("tools", "tools", [WEATHER] * 129),
    ("tools[0].type", "tools", [{"type": "web_search"}]),
    ("tools[0].function", "tools", [{"type": "function"}]),
    ("tools[0].function.name", "tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools[0].function.name", "tools", [{"type": "function", "function": {"name": ""}}]),
    ("tools[1].function.name", "tools", [TIME, TIME]),
    ("tools[0].function.colour", "tools", [{"type": "function", "function": {"name": "f", "colour": 1}}]),
    (
        "tools[0].function.parameters",
        "tools",
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    ),
    (
        "tools[0].function.parameters",
        "tools",
        [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": 5}}}],
    ),
    ("tool_choice", "tool_choice", "any"),
    ("tool_choice", "tool_choice", {"type": "function", "function": {"name": "nobody"}}),
    ("tool_choice.function", "tool_choice", {"type": "function"}),
    ("tool_choice", "tool_choice", 5),
    ("parallel_tool_calls", "parallel_tool_calls", 1),
    ("messages[0].tool_call_id", "messages", [{"role": "tool", "content": "x"}]),
    ("messages[0].tool_call_id", "messages", [{"role": "tool", "content": "x", "tool_call_id": "nothing"}]),
    ("messages[0].tool_call_id", "messages", [{"role": "user", "content": "x", "tool_call_id": "y"}]),
    (
        "messages[0].tool_calls",
        "messages",
        [{"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}],
    ),
    ("messages[0].role", "messages", [{"role": "function", "content": "x", "name": "f"}]),
]


@pytest.mark.parametrize(("param", "field", "value"), WRONG)
async def test_what_is_wrong_with_tools_is_named(serve_tools: Any, param: str, field: str, value: object) -> None:
    served = serve_tools()
    body = {"messages": HELLO, "tools": TOOLS, field: value}
    async with served.http() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert "NamedTool" not in error["message"]
    assert served.engine.submitted == []


async def test_b55_tools_without_a_parser(served: Any, serve_tools: Any) -> None:
    asked = {"model": "smol", "messages": HELLO, "tools": TOOLS}
    for server, reason in (
        (served, "does not know tools"),  # SmolLM2's own template
        (serve_tools(tool_parser="none"), "without a tool parser"),
        (serve_tools("unknown"), "--tool-parser"),
    ):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "time"}}):
            with pytest.raises(openai.BadRequestError, match=reason) as bad:
                await server.openai().chat.completions.create(**asked, tool_choice=choice)
            assert bad.value.param == "tools"
        assert server.engine.submitted == []
        answer = await server.openai().chat.completions.create(**asked, tool_choice="none")
        assert answer.choices[0].message.content
    calls = [{"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}]
    with pytest.raises(openai.BadRequestError) as bad:
        messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
        await served.openai().chat.completions.create(model="smol", messages=messages)
    assert bad.value.param == "messages[1].tool_calls"


async def test_b55_a_choice_without_tools_and_the_old_fields(serve_tools: Any) -> None:
    served = serve_tools("unknown", tool_parser="hermes")
    (said,) = await ask(served, HERMES_TIME, stream=False)  # the parser that was named
    assert said["calls"] == [("time", "{}")]
    async with served.http() as client:
        for fields, param, advice in (
            ({"tool_choice": "required"}, "tool_choice", "no tools"),
            ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tools"),
            ({"functions": [TIME["function"]]}, "functions", "use tools"),
            ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ):
            answer = await client.post("/v1/chat/completions", json={"messages": HELLO, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert advice in answer.json()["error"]["message"]
        answer = await client.post("/v1/chat/completions", json={"messages": HELLO, "tools": [], "tool_choice": "auto"})
        assert answer.status_code == 200


async def test_a_template_that_refuses_calls_is_the_requests_fault(serve_tools: Any) -> None:
    served = serve_tools("llama")
    calls = [{"id": str(n), "type": "function", "function": {"name": "time", "arguments": "{}"}} for n in range(2)]
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(openai.BadRequestError, match="single tool-calls at once"):
        await served.openai().chat.completions.create(model="smol", messages=messages)


async def test_tokenize_counts_the_tools_too(serve_tools: Any) -> None:
    served = serve_tools()
    served.engine.script = served.ids("x")
    answer = await served.openai().chat.completions.create(model="smol", messages=HELLO, tools=TOOLS)
    async with served.http() as client:
        counted = await client.post("/tokenize", json={"messages": HELLO, "tools": TOOLS})
        assert counted.json()["count"] == answer.usage.prompt_tokens
        assert (await client.post("/tokenize", json={"prompt": "x", "tools": TOOLS})).status_code == 400


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, None),
    ],
)
async def test_a_grammar_that_fails_on_the_way_names_its_field(
    serve_tools: Any, wishes: dict[str, Any], param: str | None
) -> None:
    """Where only one can have brought it."""
    served = serve_tools()
    served.engine.grammar_error = "too hard to follow"
    with pytest.raises(openai.BadRequestError, match="too hard to follow") as caught:
        await ask(served, "Hello", stream=False, **wishes)
    assert (caught.value.code, caught.value.param) == ("grammar_error", param)
