"""/v1/responses through OpenAI's own client: items, events and their order, calls, reasoning, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
OSLO = '{"city": "Oslo 🫠"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
def thinker(serve: Any, speak: Any, templates: dict[str, str]) -> Any:
    """A server of a model that thinks and calls as Qwen3 does."""
    return serve(with_tokenizer=speak(templates["hermes"]))


def kinds(events: list[Any]) -> list[str]:
    """The events' types; deltas in a row once."""
    types = [event.type for event in events]
    return [kind for place, kind in enumerate(types) if place == 0 or kind != types[place - 1]]


async def stream(served: Any, **wishes: Any) -> list[Any]:
    """All events; their numbers are in order, and what grew is what is whole in the end."""
    events = [event async for event in await served.openai().responses.create(model="smol", stream=True, **wishes)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    grown: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta
        elif event.type.endswith(("text.done", "arguments.done")):
            whole = event.arguments if "arguments" in event.type else event.text
            assert grown.get(event.item_id, "") == whole
        elif event.type == "response.output_item.done":
            assert events[-1].response.output[event.output_index] == event.item
    return events


async def test_a_text_and_its_response(served: Any) -> None:
    served.engine.script = served.ids("The answer is 42.")
    response = await served.openai().responses.create(
        model="smol", input="What is it?", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert response.output_text == "The answer is 42."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.model, response.object, response.metadata) == ("smol", "response", {"a": "b"})
    assert (response.temperature, response.top_p, response.instructions) == (0.5, 1.0, "Be brief.")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
    prompt = served.tokenizer.encode_chat(messages)
    assert served.engine.submitted[0][1] == prompt
    assert response.usage.to_dict() == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": len(prompt) // 2},
        "output_tokens": len(served.engine.script) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(served.engine.script) + 1,
    }


@pytest.mark.parametrize("at_once", [1, 7, 1000])
async def test_a_stream_of_text(served: Any, at_once: int) -> None:
    served.engine.script = served.ids("a 你好 🫠 b")
    served.engine.tokens_at_once = at_once
    events = await stream(served, input="hi")
    assert kinds(events) == TEXT_EVENTS
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == "a 你好 🫠 b"
    whole = await served.openai().responses.create(model="smol", input="hi")
    assert events[-1].response.usage == whole.usage


async def test_the_stream_as_it_is_on_the_wire(served: Any) -> None:
    async with served.http() as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_the_clients_own_helper_for_streams(served: Any) -> None:
    served.engine.script = served.ids("one two")
    async with served.openai().responses.stream(model="smol", input="hi") as events:
        assert [event.type async for event in events][-1] == "response.completed"
        assert (await events.get_final_response()).output_text == "one two"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_is_cut(served: Any, streamed: bool) -> None:
    wishes = {"input": "one two three four", "max_output_tokens": 2}
    if streamed:
        events = await stream(served, **wishes)
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = await served.openai().responses.create(model="smol", **wishes)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"
    assert response.usage.output_tokens == 2


@pytest.mark.parametrize("at_once", [1, 1000])
async def test_reasoning_text_and_two_calls(thinker: Any, at_once: int) -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    thinker.engine.script = thinker.tokenizer.encode_rendered(text)
    thinker.engine.tokens_at_once = at_once
    events = await stream(thinker, input="hi", tools=[WEATHER])
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert kinds(events) == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.delta", "response.reasoning_text.done", *done),
        *(*item, "response.output_text.delta", "response.output_text.done", *done),
        *(item[0], *call, done[1]),
        *(item[0], *call, done[1]),
        "response.completed",
    ]
    whole = await thinker.openai().responses.create(model="smol", input="hi", tools=[WEATHER])
    for response in (events[-1].response, whole):
        reasoning, message, *calls = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Let me see.")
        assert [(each.name, each.arguments, each.status) for each in calls] == [("get_weather", OSLO, "completed")] * 2
        assert len({each.id for each in response.output} | {each.call_id for each in calls}) == 6
        assert response.usage.output_tokens_details.reasoning_tokens == len(
            thinker.tokenizer.encode_rendered("<think>\nHm.\n</think>")
        )


async def test_an_output_can_be_sent_again_with_what_its_calls_gave(thinker: Any) -> None:
    thinker.engine.script = thinker.tokenizer.encode_rendered(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    client = thinker.openai()
    conversation: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    response = await client.responses.create(model="smol", input=conversation, tools=[WEATHER])
    conversation += response.output
    call = response.output[-1]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"})
    await client.responses.create(model="smol", input=conversation, tools=[WEATHER], tool_choice="none")
    prompt = thinker.tokenizer.backend.decode(thinker.engine.submitted[-1][1])
    assert prompt == (
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\nLet me see.\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n12 °C<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_call_can_be_asked_for(thinker: Any, follows: Any) -> None:
    thinker.engine.script = thinker.tokenizer.encode_rendered(CALL)
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        response = await thinker.openai().responses.create(
            model="smol", input="hi", tools=[WEATHER], tool_choice=choice, reasoning={"effort": "none"}
        )
        assert [item.type for item in response.output] == ["function_call"]
        grammar = thinker.engine.submitted[-1][2].grammar
        assert follows(thinker.tokenizer, grammar, CALL)
        assert not follows(thinker.tokenizer, grammar, "text")
    assert response.tools[0].name == "get_weather"


async def test_a_format_of_the_text(thinker: Any, follows: Any) -> None:
    class Answer(pydantic.BaseModel):
        number: int

    thinker.engine.script = thinker.tokenizer.encode_rendered('<think>Hm.</think>{"number": 42}')
    response = await thinker.openai().responses.parse(model="smol", input="hi", text_format=Answer)
    assert response.output_parsed == Answer(number=42)
    assert response.text.format.schema_["properties"] == {"number": {"title": "Number", "type": "integer"}}
    grammar = thinker.engine.submitted[-1][2].grammar
    assert follows(thinker.tokenizer, grammar, '<think>Hm.</think>{"number": 42}')
    assert not follows(thinker.tokenizer, grammar, '{"number": "42"}')
    await thinker.openai().responses.create(
        model="smol", input="hi", text={"format": {"type": "json_object"}}, reasoning={"effort": "none"}
    )
    assert follows(thinker.tokenizer, thinker.engine.submitted[-1][2].grammar, '{"a": 1}')


async def test_an_engine_that_fails_in_the_middle_of_a_stream(served: Any) -> None:
    served.engine.script = served.ids("one two three four five six")
    served.engine.fails_after = 2
    events = [event async for event in await served.openai().responses.create(model="smol", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "engine_failed"
    with pytest.raises(openai.InternalServerError):  # before it has begun there is a status
        await served.openai().responses.create(model="smol", input="hi", stream=True)


WRONG = [
    ("input", None),
    ("input", []),
    ("input", "many words " * 1000),
    ("input[0].content", [{"role": "user"}]),
    ("input[0].role", [{"content": "x"}]),
    ("input[0].role", [{"role": "king", "content": "x"}]),
    ("input[0].type", [{"type": "web_search_call"}]),
    ("input[0].content[0].type", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("input[0].content[0].type", [{"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}]),
    ("input[0].call_id", [{"type": "function_call_output", "output": "x"}]),
    ("input[0].call_id", [{"type": "function_call_output", "call_id": "c", "output": "x"}]),
    ("input[0].name", [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}]),
    ("input[0].output", [{"role": "user", "content": "x", "output": "y"}]),
    ("input[0].colour", [{"role": "user", "content": "x", "colour": "red"}]),
    ("instructions", 5),
    ("max_output_tokens", 0),
    ("max_output_tokens", 10**6),
    ("temperature", 1000),
    ("tools[0].name", [{"type": "function", "name": ""}]),
    ("tools[0].type", [{"type": "web_search"}]),
    ("tools[0].parameters", [{"type": "function", "name": "f", "parameters": {"type": "array"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("text.format.type", {"format": {"type": "xml"}}),
    ("text.format.schema", {"format": {"type": "json_schema", "name": "x"}}),
    ("text.format.name", {"format": {"type": "json_schema", "schema": {}}}),
    ("text.format.name", {"format": {"type": "text", "name": "x"}}),
    ("text.format.schema", {"format": {"type": "json_schema", "name": "x", "schema": {"type": "number", "if": {}}}}),
    ("structured_outputs", {"regex": "a", "json_object": True}),
    ("reasoning.effort", {"effort": "high"}),
    ("metadata.a", {"a": 5}),
    ("previous_response_id", "resp_1"),
    ("conversation", "conv_1"),
    ("store", True),
    ("background", True),
    ("include", ["message.output_text.logprobs"]),
    ("n", 2),
    ("max_tokens", 5),
    ("messages", [{"role": "user", "content": "x"}]),
]


@pytest.mark.parametrize(("param", "value"), WRONG)
async def test_what_is_wrong_is_named(thinker: Any, param: str, value: object) -> None:
    body = {"input": "hi", param.split("[")[0].split(".")[0]: value}
    async with thinker.http() as client:
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or error["code"] == "context_length_exceeded"
    assert thinker.engine.submitted == []


async def test_what_keeps_nothing_says_so(served: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        await served.openai().responses.create(model="smol", input="hi", previous_response_id="resp_1")
    response = await served.openai().responses.create(model="smol", input="hi", store=False)
    assert response.model_extra["store"] is False
    with pytest.raises(openai.BadRequestError, match="roles must alternate") as bad:
        served.tokenizer.backend.chat_template, kept = (
            "{{ raise_exception('roles must alternate') }}",
            served.tokenizer.backend.chat_template,
        )
        try:
            await served.openai().responses.create(model="smol", input="hi")
        finally:
            served.tokenizer.backend.chat_template = kept
    assert bad.value.param == "input"
