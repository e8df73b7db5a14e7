"""Log-probabilities of prompts: echoed as OpenAI does, and as vLLM's prompt_logprobs."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

TEXT = "one two three four five"
HELLO = [{"role": "user", "content": "Hello"}]


async def post(served: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with served.http() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


@pytest.mark.parametrize("prompt", ["text", "ids"])
async def test_an_echoed_prompt_has_logprobs_where_the_answer_has(served: Any, prompt: str) -> None:
    """What lm-eval-harness sends to score a text."""
    ids = served.ids(TEXT)
    body = {"prompt": TEXT if prompt == "text" else [ids, ids], "echo": True, "logprobs": 2, "max_tokens": 2}
    for choice in (await post(served, "/v1/completions", body))["choices"]:
        assert choice["text"] == TEXT + "one two"
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == TEXT + "one two"
        assert logprobs["token_logprobs"] == [None, *[-0.5] * (len(ids) + 1)]
        assert logprobs["top_logprobs"][0] is None
        assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * (len(ids) + 1)
        assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:place])) for place in range(len(ids) + 2)]
    assert served.engine.submitted[0][2].prompt_logprobs == 2


async def test_a_prompt_alone_is_scored_without_an_answer(served: Any) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await post(served, "/v1/completions", body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(served.ids(TEXT)) - 1)]
    assert choice["logprobs"]["top_logprobs"][1] == {choice["logprobs"]["tokens"][1]: -0.5}
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_is_given_back(served: Any, stream: bool) -> None:
    wish = {"model": "smol", "prompt": [TEXT, "one"], "echo": True, "max_tokens": 0}
    answer = await served.openai().completions.create(**wish, stream=stream)
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    assert [(choice.text, choice.finish_reason, choice.logprobs) for choice in choices] == [
        (TEXT, "length", None),
        ("one", "length", None),
    ]


async def test_a_streamed_echo_says_the_same(served: Any) -> None:
    wish = {"model": "smol", "prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2, "seed": 0}
    client = served.openai()
    whole = (await client.completions.create(**wish)).choices
    streamed: list[dict[str, list[Any]]] = [{}, {}]
    async for chunk in await client.completions.create(**wish, stream=True):
        for name, values in chunk.choices[0].logprobs.model_dump().items():
            streamed[chunk.choices[0].index].setdefault(name, []).extend(values)
    assert streamed == [choice.logprobs.model_dump() for choice in whole]


async def test_prompt_logprobs_of_vllm(served: Any) -> None:
    ids = served.ids(TEXT)
    choice = (await post(served, "/v1/completions", {"prompt": TEXT, "prompt_logprobs": 2}))["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [{*each} for each in rest] == [{str(token), str(token + 1)} for token in ids[1:]]
    # The engine of these tests calls the token itself the likeliest.
    assert rest[0][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": " two"}
    assert rest[0][str(ids[1] + 1)]["rank"] == 2
    assert choice["logprobs"] is None
    none = (await post(served, "/v1/completions", {"prompt": TEXT, "prompt_logprobs": 0}))["choices"][0]
    assert none["prompt_logprobs"][1] == {str(ids[1]): {"logprob": -0.5, "rank": 7, "decoded_token": " two"}}

    chat = await post(served, "/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 1, "n": 2})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in await post(served, "/v1/chat/completions", {"messages": HELLO})


async def test_each_shape_has_as_many_likely_tokens_as_it_was_asked_for(served: Any) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    choice = (await post(served, "/v1/completions", body))["choices"][0]
    assert served.engine.submitted[0][2].prompt_logprobs == 3
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [3] * 4
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [1] * 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": TEXT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": TEXT, "max_tokens": 0}, "max_tokens"),
        ({"prompt": TEXT, "max_tokens": 0, "echo": False}, "max_tokens"),
        ({"prompt": TEXT, "max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
async def test_what_makes_no_sense_is_refused(served: Any, body: dict[str, Any], param: str) -> None:
    async with served.http() as client:
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
