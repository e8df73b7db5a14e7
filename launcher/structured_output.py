"""What an answer must look like, as a grammar for SamplingParams.grammar.

Each function gives a grammar in the notation of llguidance, which is checked when a request uses it:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

Of JSON schemas llguidance follows a large part, and what it does not is an error that names the keyword:
https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from paceline.coordinator.checks import shown
from paceline.coordinator.errors import InputError
from paceline.launcher.json_text import parse_json

MAX_CHOICES = 4096
MAX_NESTING = 64

WHITESPACE = r"[ \n\r\t]{1,64}"
"""Between JSON's tokens. Without a bound a model that has lost its way may write line breaks for ever."""


def json_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """JSON that is valid by a schema, given as JSON text or as what that stands for.

    Raises InputError where it is no schema at all, or is nested more than MAX_NESTING levels deep.
    """
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except json.JSONDecodeError as error:
            raise InputError(f"the JSON schema is no valid JSON at character {error.pos}") from error
        except ValueError as error:  # a number too long to read, or nested beyond all measure
            raise InputError("the JSON schema is nested too deep, or holds a number that is too long") from error
    if not isinstance(schema, (Mapping, bool)):
        raise InputError(f"a JSON schema must be an object, got {shown(schema)}")
    _check_nesting(schema)
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"the JSON schema holds what JSON has not: {error}") from error
    # A schema may not make its own errors pass (x-guidance can ask for that).
    return llguidance.LLMatcher.grammar_from_json_schema(
        _text(text, "the JSON schema"), defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": False}
    )


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole; without look-around and backreferences.

    https://docs.rs/regex/latest/regex/#syntax
    """
    return llguidance.LLMatcher.grammar_from_regex(_text(pattern, "a regular expression"))


def choice(texts: Sequence[str]) -> str:
    """One of some texts. Raises InputError where there is none, an empty one, or more than MAX_CHOICES."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts or len(texts) > MAX_CHOICES:
        raise InputError(f"choices must be a list of 1 to {MAX_CHOICES} texts, got {shown(texts)}")
    for text in texts:
        if not _text(text, "a choice"):
            raise InputError("a choice must not be empty")
    # Lark's texts are written as JSON's. As one terminal (in capitals) they are one automaton; as alternatives of a
    # rule each would be a way to go on, of which llguidance follows 2,000.
    return llguidance.grammar_from("lark", "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, dict.fromkeys(texts))))


def context_free(text: str) -> str:
    """Text of a grammar, in Lark's notation as llguidance extends it, or in llama.cpp's GBNF.

    Raises InputError where it is GBNF that cannot be read; Lark is looked at when the grammar is used.
    """
    try:
        return llguidance.grammar_from("grammar", _text(text, "a grammar"))
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from error


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} must be a text, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is no valid Unicode text at character {error.start}") from error
    return value


def _check_nesting(schema: object) -> None:
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise InputError(f"the JSON schema is nested more than {MAX_NESTING} levels deep")


def _children(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()
