"""Fields that ask for an answer of a certain form: read from a body as a grammar, and checked beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.launcher import structured_output
from paceline.launcher.grammars import TokenizerGrammars
from paceline.launcher.serving.errors import bad_request, missing
from paceline.launcher.serving.responses_schemas import ResponsesBody, TextFormat
from paceline.launcher.serving.schemas import AnswerBody, ResponseFormat, SamplingBody, StructuredOutputs
from paceline.launcher.serving.tool_use import ToolUse
from paceline.launcher.tokenizer import Tokenizer

_Asked = tuple[str, Callable[[Any], str], Any]
"""A field, how its value becomes a grammar, and the value."""


def requested_grammar(body: SamplingBody) -> tuple[str, str] | None:
    """The field that asks for a form, and its grammar; None where none does.

    Raises ApiError (400) for two of them at once, and for a value that gives no grammar.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    (param, build, value), *others = asked
    if others:
        raise bad_request(f"{others[0][0]} and {param} are both given; an answer has one form", others[0][0])
    try:
        return param, build(value)
    except InputError as error:
        raise bad_request(f"{param}: {error}", param) from error


def grammar_field(body: SamplingBody, use: ToolUse | None = None) -> str | None:
    """The field to name where an answer's grammar fails on the way; None where more than one is in it."""
    fields = [param for param, _, _ in _asked(body)] + ([] if use is None else ["tools"])
    return fields[0] if len(fields) == 1 else None


def _asked(body: SamplingBody) -> Iterator[_Asked]:
    if isinstance(body, AnswerBody) and body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if isinstance(body, ResponsesBody) and body.text is not None and body.text.format is not None:
        yield from _of_text_format(body.text.format)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    for field, build in _GUIDED.items():
        value = getattr(body, field)
        if value is not None:
            yield field, build, value


def _of_response_format(given: ResponseFormat) -> Iterator[_Asked]:
    field = "response_format.json_schema"
    if given.type == "json_schema" and given.json_schema is None:
        raise missing(field)
    if given.type != "json_schema" and given.json_schema is not None:
        raise bad_request(f"{field} goes with the type json_schema only", field)
    if given.json_schema is not None:
        yield f"{field}.schema", structured_output.json_schema, given.json_schema.schema_
    elif given.type == "json_object":
        yield "response_format", lambda _: structured_output.json_object(), None


def _of_text_format(given: TextFormat) -> Iterator[_Asked]:
    named = {"name": given.name, "schema": given.schema_}
    for field, value in {**named, "description": given.description, "strict": given.strict}.items():
        if given.type == "json_schema" and field in named and value is None:
            raise missing(f"text.format.{field}")
        if given.type != "json_schema" and value is not None:
            raise bad_request(f"text.format.{field} goes with the type json_schema only", f"text.format.{field}")
    if given.type == "json_schema":
        yield "text.format.schema", structured_output.json_schema, given.schema_
    elif given.type == "json_object":
        yield "text.format", lambda _: structured_output.json_object(), None


def _of_structured_outputs(given: StructuredOutputs) -> _Asked:
    values = {
        field.alias or name: value
        for name, field in StructuredOutputs.model_fields.items()
        if (value := getattr(given, name)) is not None
    }
    if len(values) != 1:
        raise bad_request(f"structured_outputs must hold one of {', '.join(_FORMS)}", "structured_outputs")
    ((name, value),) = values.items()
    return f"structured_outputs.{name}", _FORMS[name], value


def _json_object(wanted: bool) -> str:
    if not wanted:
        raise InputError("must be true or left out")
    return structured_output.json_object()


_FORMS: dict[str, Callable[[Any], str]] = {
    "json": structured_output.json_schema,
    "regex": structured_output.regex,
    "choice": structured_output.choice,
    "grammar": structured_output.context_free,
    "json_object": _json_object,
}
_GUIDED = {name: build for form, build in _FORMS.items() if (name := f"guided_{form}") in SamplingBody.model_fields}


class GrammarCheck:
    """Tries grammars before they go to the engine, so that a bad one is an error of the field that holds it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: TokenizerGrammars | None = None

    def prepare(self) -> None:
        """Do now what the first check would have to: it takes a second in which nothing else runs."""
        if self._tokenizer.backend is not None:
            self._library().prepare()

    async def check(self, body: SamplingBody, use: ToolUse | None = None) -> None:
        """Raise ApiError (400) where the body asks for a form, or for calls of tools, that cannot be followed."""
        asked = requested_grammar(body)
        for param, grammar in (*(() if asked is None else (asked,)), *(() if use is None else use.schemas)):
            await self._check(param, grammar)

    async def _check(self, param: str, grammar: str) -> None:
        library = self._library()
        if library.is_known(grammar):
            return
        try:
            await asyncio.wrap_future(library.begin_check(grammar))
        except InputError as error:
            raise bad_request(f"{param}: {error}", param) from error

    def _library(self) -> TokenizerGrammars:
        if self._grammars is None:
            # Which ids may end an answer has no bearing on whether a grammar is good.
            self._grammars = TokenizerGrammars(self._tokenizer, 0, self._tokenizer.end_ids)
        return self._grammars
