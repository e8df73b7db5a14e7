"""Models that think before they answer: reasoning apart from content, counted, switched off, and free of grammars."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import openai
import pytest

from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.dialects.dialect import find_dialect
from paceline.launcher.serving.conversation import held_to
from paceline.launcher.serving.prompts import Prompt
from paceline.launcher.serving.tool_schemas import FunctionDefinition
from paceline.launcher.serving.tool_use import read_tools

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "What is 6 times 7?"}]
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "Six 你好 🫠 < </thin.\n\nSo 42."
ANSWERS = {"hermes": f"<think>\n{THOUGHT}\n</think>\n\n", "r1": f"{THOUGHT}\n</think>\n\n"}
FORMS = [("hermes", "special"), ("hermes", "added"), ("hermes", "text"), ("r1", "special"), ("r1", "text")]


@pytest.fixture
def serve_thinker(serve: Any, speak: Any, templates: dict[str, str]) -> Callable[..., Any]:
    """serve_thinker(form, tags): a server of a model that thinks; `hermes` writes both tags itself, `r1` only one."""

    def make(form: str = "hermes", tags: str = "added", **settings: Any) -> Any:
        return serve(with_tokenizer=speak(templates[form], tags=tags), **settings)

    return make


async def ask(served: Any, text: str, *, stream: bool, **wishes: Any) -> tuple[str, str, Any]:
    """Reasoning, content and usage of the scripted answer, whether it was streamed or not."""
    served.engine.script = served.tokenizer.encode_rendered(text)
    wishes = {"model": "smol", "messages": HELLO} | wishes
    create = served.openai().chat.completions.create
    if not stream:
        answer = await create(**wishes)
        message = answer.choices[0].message
        extra = message.model_extra
        assert extra.get("reasoning") == extra.get("reasoning_content")
        return extra.get("reasoning", ""), message.content, answer.usage
    reasoning = content = ""
    usage = None
    async for chunk in await create(**wishes, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            extra = choice.delta.model_extra
            assert extra.get("reasoning") == extra.get("reasoning_content")
            assert not (extra.get("reasoning") and content)
            reasoning += extra.get("reasoning", "")
            content += choice.delta.content or ""
        usage = chunk.usage
    return reasoning, content, usage


@pytest.mark.parametrize(("form", "tags"), FORMS)
async def test_reasoning_reads_the_same_streamed_or_not(serve_thinker: Any, form: str, tags: str) -> None:
    served = serve_thinker(form, tags)
    counted = len(served.tokenizer.encode_rendered(ANSWERS[form].rstrip()))
    for at_once in (1, 2, 7, 1000):
        served.engine.tokens_at_once = at_once
        for stream in (False, True):
            reasoning, content, usage = await ask(served, ANSWERS[form] + "It is 42.", stream=stream)
            assert (reasoning, content) == (THOUGHT, "It is 42.")
            assert usage.completion_tokens_details.reasoning_tokens == counted
            assert usage.completion_tokens == len(served.engine.script) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_that_is_never_finished_is_all_there_is(serve_thinker: Any, stream: bool) -> None:
    for form in ANSWERS:
        served = serve_thinker(form)
        reasoning, content, usage = await ask(served, ANSWERS[form], stream=stream, max_tokens=7)
        assert THOUGHT.startswith(reasoning.rstrip("\ufffd"))
        assert reasoning
        assert content == ""
        assert usage.completion_tokens_details.reasoning_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_thought(serve_thinker: Any, stream: bool) -> None:
    reasoning, content, usage = await ask(serve_thinker(), "<b>42</b>", stream=stream)
    assert (reasoning, content, usage.completion_tokens_details) == ("", "<b>42</b>", None)
    off = serve_thinker(reasoning_parser="none")
    assert (await ask(off, "<think>a</think>b", stream=stream))[:2] == ("", "<think>a</think>b")
    unknown = serve_thinker("llama", reasoning_parser="think")
    assert (await ask(unknown, "<think>a</think>b", stream=stream))[:2] == ("a", "b")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_after_a_thought_and_none_within(serve_thinker: Any, stream: bool) -> None:
    served = serve_thinker()
    served.engine.script = served.tokenizer.encode_rendered(f"<think>\nMaybe {CALL}?\n</think>\n\n{CALL}")
    wishes = {"model": "smol", "messages": HELLO, "tools": [TIME]}
    if stream:
        chunks = [chunk async for chunk in await served.openai().chat.completions.create(**wishes, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.model_extra.get("reasoning", "") for delta in deltas) == f"Maybe {CALL}?"
        assert [call.id is not None for delta in deltas for call in delta.tool_calls or ()].count(True) == 1
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        answer = await served.openai().chat.completions.create(**wishes)
        assert answer.choices[0].message.model_extra["reasoning"] == f"Maybe {CALL}?"
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("time", "{}")


async def test_thinking_can_be_switched_off_in_two_ways(serve_thinker: Any) -> None:
    served = serve_thinker()
    for wish in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        reasoning, content, usage = await ask(served, "42 <think>", stream=False, **wish)
        assert (reasoning, content, usage.completion_tokens_details) == ("", "42 <think>", None)
        prompt = served.tokenizer.backend.decode(served.engine.submitted[-1][1])
        assert prompt.endswith("<think>\n\n</think>\n\n")


async def test_an_effort_that_cannot_be_obeyed_is_named(
    serve_thinker: Any, served: Any, speak: Any, serve: Any
) -> None:
    async def refused(server: Any, effort: str, **extra: Any) -> str:
        with pytest.raises(openai.BadRequestError) as bad:
            await server.openai().chat.completions.create(
                model="smol", messages=HELLO, reasoning_effort=effort, extra_body=extra
            )
        assert bad.value.param == "reasoning_effort"
        return str(bad.value)

    assert "knows no efforts" in await refused(serve_thinker(), "high")
    assert "knows no efforts" in await refused(served, "low")
    assert "cannot be turned off" in await refused(serve_thinker("r1"), "none")
    assert "differ" in await refused(serve_thinker(), "none", chat_template_kwargs={"enable_thinking": True})
    await ask(served, "42", stream=False, reasoning_effort="none")  # it does not think anyway
    leveled = serve(with_tokenizer=speak("{{ reasoning_effort }} {{ messages[0].content }}"))
    await ask(leveled, "42", stream=False, reasoning_effort="high")
    assert leveled.tokenizer.backend.decode(leveled.engine.submitted[-1][1]).startswith("high What")


async def test_earlier_thoughts_reach_the_template_under_either_name(serve: Any, speak: Any) -> None:
    served = serve(with_tokenizer=speak("{% for m in messages %}{{ m.reasoning_content }};{{ m.content }}{% endfor %}"))
    async with served.http() as client:
        for fields in (
            {"reasoning": "hm"},
            {"reasoning_content": "hm"},
            {"reasoning": "hm", "reasoning_content": "hm"},
        ):
            body = {"messages": [{"role": "assistant", "content": "42", **fields}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert served.tokenizer.backend.decode(served.engine.submitted[-1][1]) == "hm;42"
        for role, fields in (
            ("user", {"reasoning": "hm"}),
            ("assistant", {"reasoning": "a", "reasoning_content": "b"}),
        ):
            body = {"messages": [{"role": role, "content": "42", **fields}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].reasoning")


YES = 'start: "yes" | "no"'
NUMBER = '{"grammars": [{"json_schema": {"type": "integer"}}]}'


@pytest.mark.parametrize(("form", "tags"), FORMS)
@pytest.mark.parametrize(("grammar", "good"), [(YES, "yes"), (NUMBER, "42")])
def test_a_grammar_holds_for_what_comes_after_the_thought(
    speak: Any, templates: dict[str, str], follows: Any, form: str, tags: str, grammar: str, good: str
) -> None:
    tokenizer = speak(templates[form], tags=tags)
    prompt = tokenizer.render_chat(HELLO)
    params = SamplingParams(grammar=grammar)
    rules = held_to(params, None, Prompt((), ending=prompt), find_dialect(tokenizer))
    followed = functools.partial(follows, tokenizer, rules.grammar)
    assert followed(ANSWERS[form] + good)
    assert not followed(ANSWERS[form] + "maybe")
    assert not followed("maybe")
    assert followed(good) == (form == "hermes")  # a thought that was not begun may be left out
    quiet = Prompt((), ending="<think>\n\n</think>\n\n")
    assert held_to(params, None, quiet, find_dialect(tokenizer)) == params


async def test_a_call_that_must_come_may_be_thought_about(serve_thinker: Any, follows: Any) -> None:
    served = serve_thinker()
    await ask(served, ANSWERS["hermes"] + CALL, stream=False, tools=[TIME], tool_choice="required")
    followed = functools.partial(follows, served.tokenizer, served.engine.submitted[-1][2].grammar)
    assert followed(ANSWERS["hermes"] + CALL)
    assert followed(CALL)
    assert not followed(ANSWERS["hermes"] + "42")
    strict = {"type": "function", "function": {"name": "time", "strict": True}}
    await ask(served, "42", stream=False, tools=[strict])
    followed = functools.partial(follows, served.tokenizer, served.engine.submitted[-1][2].grammar)
    assert followed(ANSWERS["hermes"] + "42")
    assert followed(ANSWERS["hermes"] + CALL)
    assert not followed(ANSWERS["hermes"] + CALL.replace("{}", "5"))


def test_a_format_and_tools_allow_either(speak: Any, templates: dict[str, str], follows: Any) -> None:
    tokenizer = speak(templates["hermes"])
    dialect = find_dialect(tokenizer)
    use = read_tools([FunctionDefinition(name="time")], "auto", None, dialect)
    rules = held_to(SamplingParams(grammar=NUMBER), use, Prompt(()), dialect)
    followed = functools.partial(follows, tokenizer, rules.grammar)
    assert followed("42")
    assert followed(CALL)
    assert followed(ANSWERS["hermes"] + CALL)
    assert not followed("text")
