"""Conversations over HTTP, mostly through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Say: 你好 🫠, friend."}]


async def collect(stream: Any) -> tuple[dict[int, str], list[Any]]:
    """Text of each choice, and all chunks."""
    texts: dict[int, str] = {}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, chunks


async def test_an_answer_as_the_openai_client_reads_it(served: Any) -> None:
    served.engine.script = served.ids("The answer is 42.")
    answer = await served.openai().chat.completions.create(model="alias", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.model == "smol"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The answer is 42.")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    prompt = served.tokenizer.encode_chat(HELLO)
    assert served.engine.submitted[0][1] == prompt
    completion = len(served.engine.script) + 1
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": completion,
        "total_tokens": len(prompt) + completion,
        "prompt_tokens_details": {"cached_tokens": len(prompt) // 2},
    }


@pytest.mark.parametrize("at_once", [1, 2, 7])
async def test_the_join_of_the_pieces_is_the_whole(served: Any, at_once: int) -> None:
    served.engine.script = served.ids("a\U0001fae0\U0001f979龜 b  don't , stop .\n\n  c 你好 👩‍👩‍👧")
    served.engine.tokens_at_once = at_once
    client = served.openai()
    for limit in (None, 2, 3, 5, 9):  # also torn in the middle of a character
        whole = await client.chat.completions.create(model="smol", messages=HELLO, max_tokens=limit)
        texts, chunks = await collect(
            await client.chat.completions.create(model="smol", messages=HELLO, max_tokens=limit, stream=True)
        )
        assert texts == {0: whole.choices[0].message.content}
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert "\ufffd" not in "".join(texts[0])[:-1]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stream_options": {"include_usage": True}}])
async def test_events_differ_in_what_is_new_alone(served: Any, fields: dict[str, Any]) -> None:
    """However an event is put together, it is compact JSON whose fields have one order."""
    text = 'He said: "\\n" is no \n, and {"content":"}"} no 你好 \x00 end.'
    served.engine.script = served.ids(text)
    async with served.http() as client:
        body = {"model": "smol", "messages": HELLO, "stream": True, "n": 2, "temperature": 0, "max_tokens": 99}
        answer = await client.post("/v1/chat/completions", json=body | fields)
    *events, end = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    assert end == b"data: [DONE]"
    said = ["", ""]
    heads = set()
    for event in events:
        content = json.loads(event.removeprefix(b"data: "))
        assert event == b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        heads.add((*content, content["id"], content["object"], content["created"], content["model"]))
        for choice in content["choices"]:
            assert list(choice)[:4] == ["index", "delta", "logprobs", "finish_reason"]
            said[choice["index"]] += choice["delta"].pop("content", "")
            assert choice["delta"] in ({}, {"role": "assistant"})
            assert (choice["logprobs"] is None) == ("logprobs" not in fields)
    assert said == [text, text]
    assert len(heads) == 1


async def test_usage_comes_with_the_stream_when_asked_for(served: Any) -> None:
    client = served.openai()
    _, plain = await collect(await client.chat.completions.create(model="smol", messages=HELLO, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    options = {"include_usage": True}
    stream = await client.chat.completions.create(model="smol", messages=HELLO, stream=True, stream_options=options)
    _, chunks = await collect(stream)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    whole = await client.chat.completions.create(model="smol", messages=HELLO)
    assert chunks[-1].usage == whole.usage
    options["continuous_usage_stats"] = True
    stream = await client.chat.completions.create(model="smol", messages=HELLO, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[0] >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_differ_and_repeat_with_their_seed(served: Any, stream: bool) -> None:
    client = served.openai()
    served.engine.script = served.ids("one two three four five six seven")

    async def ask() -> dict[int, str]:
        wish = {"model": "smol", "messages": HELLO, "n": 4, "seed": 3, "max_tokens": 5}
        if stream:
            options = {"include_usage": True}
            texts, chunks = await collect(
                await client.chat.completions.create(**wish, stream=True, stream_options=options)
            )
            usage = chunks[-1].usage
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        else:
            answer = await client.chat.completions.create(**wish)
            texts = {choice.index: choice.message.content for choice in answer.choices}
            usage, reasons = answer.usage, [choice.finish_reason for choice in answer.choices]
        assert usage.prompt_tokens == len(served.tokenizer.encode_chat(HELLO))
        assert usage.completion_tokens == 20
        assert reasons == ["length"] * 4
        return texts

    first = await ask()
    assert sorted(first) == [0, 1, 2, 3]
    assert len(set(first.values())) == 4
    assert await ask() == first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_stop_text_over_several_tokens_never_shows(served: Any, stream: bool, at_once: int) -> None:
    served.engine.script = served.ids("one two th-END-ree four five six seven eight")
    served.engine.tokens_at_once = at_once
    client = served.openai()
    wish = {"model": "smol", "messages": HELLO, "stop": ["-END-", "nowhere"]}
    if stream:
        texts, chunks = await collect(await client.chat.completions.create(**wish, stream=True))
        last = chunks[-1].choices[0]
        text = texts[0]
    else:
        last = (await client.chat.completions.create(**wish)).choices[0]
        text = last.message.content
    assert text == "one two th"
    assert last.finish_reason == "stop"
    assert last.stop_reason == "-END-"
    assert len(served.engine.aborted) == 1  # the engine does not go on for nobody
    assert served.engine.running == {}


async def test_a_stop_text_can_be_shown_and_a_stop_id_names_itself(served: Any) -> None:
    client = served.openai()
    served.engine.script = served.ids("one two three four")
    extra = {"include_stop_str_in_output": True}
    answer = await client.chat.completions.create(model="smol", messages=HELLO, stop="two", extra_body=extra)
    assert answer.choices[0].message.content == "one two"
    stop_id = served.engine.script[2]
    extra = {"stop_token_ids": [stop_id]}
    answer = await client.chat.completions.create(model="smol", messages=HELLO, extra_body=extra)
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].stop_reason == stop_id


async def test_logprobs_hold_each_tokens_bytes(served: Any) -> None:
    client = served.openai()
    served.engine.script = served.ids("x 🫠 y")
    wish = {"model": "smol", "messages": HELLO, "logprobs": True, "top_logprobs": 5}
    whole = (await client.chat.completions.create(**wish)).choices[0]
    tokens = whole.logprobs.content[:-1]  # the last one ended the answer
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == "x 🫠 y" == whole.message.content
    assert {token.logprob for token in tokens} == {-0.5}
    assert [top.logprob for top in tokens[0].top_logprobs] == [-0.5, -1.5, -2.5, -9999.0, -9999.0]
    assert tokens[0].top_logprobs[0].token == tokens[0].token == "x"
    assert any(token.token.startswith("bytes:\\x") for token in tokens)
    streamed = [
        token
        async for chunk in await client.chat.completions.create(**wish, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.logprobs.content


async def test_every_sampling_field_reaches_the_engine(served: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -5,
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop_token_ids": [9],
    }
    body = {
        **fields,
        "messages": HELLO,
        "max_completion_tokens": 4,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop": "halt",
        "priority": -3,
        "cache_salt": "mine",
        "user": "me",
        "top_logprobs": 2,
        "logprobs": True,
    }
    async with served.http() as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    ((_, _, params, priority, salt),) = served.engine.submitted
    assert {name: getattr(params, name) for name in fields} == fields | {"stop_token_ids": (9,)}
    assert (params.logit_bias, params.stop, params.max_tokens, params.logprobs) == ({5: -100, 6: 1.5}, ("halt",), 4, 2)
    assert (priority, salt) == (-3, "mine")


async def test_messages_of_parts_and_without_content(served: Any) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    plain = [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "go on"},
    ]
    await served.openai().chat.completions.create(model="smol", messages=messages)
    assert served.engine.submitted[0][1] == served.tokenizer.encode_chat(plain)


async def test_fields_that_ask_for_nothing_are_taken(served: Any) -> None:
    body = {
        "messages": HELLO,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "metadata": None,
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "stream": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with served.http() as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        forbidden = {"messages": HELLO, "tools": [tool], "tool_choice": "none"}
        assert (await client.post("/v1/chat/completions", json=forbidden)).status_code == 200
    assert served.engine.submitted[0][1] == served.engine.submitted[1][1]


async def test_template_variables_reach_the_template(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if loud %}LOUD{% else %}quiet{% endif %}"
    monkeypatch.setattr(served.tokenizer.backend, "chat_template", template)
    async with served.http() as client:
        for kwargs, text in (({"loud": True}, "LOUD"), (None, "quiet")):
            body = {"messages": HELLO, "chat_template_kwargs": kwargs}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == text
