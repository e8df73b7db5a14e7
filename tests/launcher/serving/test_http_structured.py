"""Fields that ask for an answer of a certain form: what grammar the engine gets, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from paceline.launcher.structured_output import choice, context_free, json_object, json_schema, regex
from paceline.launcher.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WIDE = {"type": "object", "properties": {f"name{place}": {} for place in range(700)}}
LARK = 'start: "x" /[0-9]+/'
PATHS = {"/v1/chat/completions": {"messages": HELLO}, "/v1/completions": {"prompt": "Hello"}}


def named_schema(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **fields}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, regex("a+")),
        ({"response_format": {"type": "json_object"}}, json_object()),
        ({"response_format": named_schema(strict=True, description="a thing")}, json_schema(SCHEMA)),
        ({"guided_json": SCHEMA}, json_schema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, regex("a+")),
        ({"guided_choice": ["a", "b"]}, choice(["a", "b"])),
        ({"guided_grammar": LARK}, context_free(LARK)),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, choice(["a"])),
        ({"structured_outputs": {"grammar": LARK}}, context_free(LARK)),
        ({"structured_outputs": {"json_object": True}}, json_object()),
    ],
)
async def test_every_field_becomes_a_grammar(
    served: Any, path: str, fields: dict[str, Any], grammar: str | None
) -> None:
    async with served.http() as client:
        answer = await client.post(path, json={**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    assert served.engine.submitted[0][2].grammar == grammar


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**named_schema(), "type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": named_schema(stric=True)}, "response_format.json_schema.stric"),
        ({"response_format": named_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": named_schema({"uniqueItems": True})}, "response_format.json_schema.schema"),
        ({"response_format": named_schema({"type": "string", "pattern": "("})}, "response_format.json_schema.schema"),
        ({"response_format": named_schema({"const": "x" * 300_000})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"response_format": named_schema(WIDE)}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json.const"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_grammar": "start: foo"}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_names_its_field(
    served: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({**PATHS[path], **fields})
    async with served.http() as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], "\n" in error["message"]) == (param, False)
    assert served.engine.submitted == []


async def test_a_model_without_a_tokenizer_has_no_forms(serve: Any, tmp_path: Any) -> None:
    served = serve(with_tokenizer=Tokenizer(tmp_path))
    async with served.http() as client:
        answer = await client.post("/v1/completions", json={"prompt": [1, 2], "guided_regex": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
    assert "tokenizer" in answer.json()["error"]["message"]


async def test_a_grammar_that_fails_on_the_way_is_an_error_of_its_request(served: Any) -> None:
    served.engine.grammar_error = "too hard to follow"
    with pytest.raises(openai.BadRequestError, match="too hard to follow") as caught:
        await served.openai().completions.create(model="smol", prompt="x", extra_body={"guided_regex": "a"})
    assert (caught.value.code, caught.value.param) == ("grammar_error", "guided_regex")
    with pytest.raises(openai.APIError, match="too hard to follow"):
        stream = await served.openai().completions.create(
            model="smol", prompt="x", stream=True, extra_body={"guided_regex": "a"}
        )
        async for _ in stream:
            pass
