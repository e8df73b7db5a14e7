"""Plain prompts, tokens, models."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from paceline.launcher.default_model import MODEL_NAME

pytestmark = pytest.mark.anyio

TEXT = "one two three four five"


async def post(served: Any, body: dict[str, Any]) -> httpx.Response:
    async with served.http() as client:
        return await client.post("/v1/completions", json=body)


async def test_a_completion_as_the_openai_client_reads_it(served: Any) -> None:
    answer = await served.openai().completions.create(model="smol", prompt=TEXT, max_tokens=4)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("one two three four", "length", None)
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_sixteen_tokens_unless_told_and_all_there_is_room_for_with_null(served: Any) -> None:
    for body, tokens in (({}, 16), ({"max_tokens": None}, 507), ({"max_tokens": 507}, 507)):
        answer = await post(served, {"prompt": TEXT, "ignore_eos": True, **body})
        assert answer.json()["usage"]["completion_tokens"] == tokens
    long_prompt = [5] * 500  # leaves less than the default: no wish of the client's, so no error
    answer = await post(served, {"prompt": long_prompt, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 12


async def test_several_prompts_with_several_choices(served: Any) -> None:
    client = served.openai()
    prompts = [TEXT, "six seven eight"]
    wish = {"model": "smol", "prompt": prompts, "n": 2, "seed": 0, "echo": True, "max_tokens": 2}
    answer = await client.completions.create(**wish)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == TEXT + "one two"
    assert texts[2] == "six seven eight" + "six seven"
    assert all(text.startswith(TEXT) for text in texts[:2])
    assert answer.usage.prompt_tokens == 8
    streamed = ["", "", "", ""]
    async for chunk in await client.completions.create(**wish, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    ids = [served.ids(prompt) for prompt in prompts]
    assert [c.text for c in (await client.completions.create(**(wish | {"prompt": ids}))).choices] == texts


async def test_logprobs_in_the_completions_shape(served: Any) -> None:
    client = served.openai()
    wish = {"model": "smol", "prompt": "x 🫠 y", "logprobs": 2, "max_tokens": 4}
    whole = (await client.completions.create(**wish)).choices[0].logprobs
    assert whole.tokens[0] == "x"
    assert whole.token_logprobs == [-0.5] * 4
    assert [top[token] for top, token in zip(whole.top_logprobs, whole.tokens, strict=True)] == [-0.5] * 4
    assert all(2 <= len(top) <= 3 for top in whole.top_logprobs)
    assert whole.text_offset == [sum(map(len, whole.tokens[:place])) for place in range(4)]
    parts = [chunk.choices[0].logprobs async for chunk in await client.completions.create(**wish, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)


async def test_a_prompt_of_token_ids_that_ends_inside_a_character_stays_out_of_the_answer(served: Any) -> None:
    pepper = served.ids("\U0001f336")
    assert len(pepper) > 2
    served.engine.script = served.ids(" done")
    whole = (await post(served, {"prompt": pepper[:2]})).json()["choices"][0]["text"]
    assert whole == " done"
    streamed = [
        chunk.choices[0].text
        async for chunk in await served.openai().completions.create(model="smol", prompt=pepper[:2], stream=True)
    ]
    assert "".join(streamed) == whole


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_without_a_tokenizer_token_ids_still_run(serve: Any, tmp_path: Any, tokens: int) -> None:
    from paceline.launcher.tokenizer import Tokenizer

    served = serve(with_tokenizer=Tokenizer(tmp_path))
    if tokens:
        answer = (await post(served, {"prompt": [7] * tokens, "logprobs": 1})).json()
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == tokens + 1
        return
    for body, param in (({"prompt": "x"}, "prompt"), ({"prompt": [7], "stop": "x"}, "stop")):
        answer = await post(served, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tokens_there_and_back(served: Any) -> None:
    async with served.http() as client:
        answer = (await client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        ids = served.ids("héllo")
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
        assert len(answer["token_strs"]) == len(ids)
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "héllo"}
        messages = [{"role": "user", "content": "hi"}]
        answer = (await client.post("/tokenize", json={"messages": messages})).json()
        assert answer["tokens"] == served.tokenizer.encode_chat(messages)
        long_text = "many words " * 5000  # tokenised in a thread
        answer = (await client.post("/tokenize", json={"prompt": long_text, "add_special_tokens": False})).json()
        assert answer["tokens"] == served.ids(long_text)
        assert (await client.post("/tokenize", json={})).json()["error"]["param"] == "prompt"
        bad = (await client.post("/detokenize", json={"tokens": [1, 10**9]})).json()
        assert bad["error"]["param"] == "tokens[1]"


async def test_long_and_short_texts_tokenised_side_by_side_keep_apart(served: Any) -> None:
    texts = [f"{place} many words " * (3000 if place % 2 else 3) for place in range(12)]
    async with served.http() as client:
        answers = await asyncio.gather(*(client.post("/tokenize", json={"prompt": text}) for text in texts))
    assert [answer.json()["tokens"] for answer in answers] == [served.ids(text) for text in texts]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_what_a_request_leaves_open_has_the_server_s_defaults(path: str, serve: Any) -> None:
    served = serve(sampling_defaults={"temperature": 0.6, "top_k": 20})
    prompt = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": "x"}]})
    async with served.http() as client:
        for rules in ({}, {"temperature": None, "top_p": 0.5}, {"temperature": 0}, {"top_k": -1}):
            assert (await client.post(path, json={"model": "smol", **body, **rules})).status_code == 200
    params = [params for _, _, params, _, _ in served.engine.submitted]
    assert [(each.temperature, each.top_k, each.top_p) for each in params] == [
        (0.6, 20, 1.0),
        (0.6, 20, 0.5),
        (0, 20, 1.0),
        (0.6, -1, 1.0),
    ]


async def test_models_are_listed_by_all_their_names(served: Any) -> None:
    models = [model async for model in served.openai().models.list()]
    assert [model.id for model in models] == ["smol", "alias"]
    assert (await served.openai().models.retrieve("alias")).id == "alias"
    async with served.http() as client:
        unknown = await client.get(f"/v1/models/org/{MODEL_NAME}")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
