"""Grammars, in llguidance's notation, of answers that hold calls of tools, or another grammar's text after reasoning.

The notation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launcher.dialects.reasoning import CLOSING, OPENING
from paceline.launcher.dialects.tool_formats import ToolFormat
from paceline.launcher.structured_output import json_schema

ANY_OBJECT = {"type": "object"}
_TEXT = "TEXT: /(?s:.*)/"

TokenIds = Mapping[str, int]
"""The ids of those tags that are tokens of their own: a Dialect's."""


@dataclass(frozen=True)
class Function:
    """A function that may be called."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of its arguments, of type object."""


def calls_grammar(tool_format: ToolFormat, token_ids: TokenIds, functions: Sequence[Function], *, several: bool) -> str:
    """Answers that are a call of one of these functions, or several, and nothing else."""
    more = ' ("\\n" call)*' if several and tool_format.several else ""
    call = _call_rule(tool_format, token_ids)
    return "\n".join([f"start: call{more}", call, *_function_rules(tool_format, functions)])


def text_or_calls_grammar(
    tool_format: ToolFormat, token_ids: TokenIds, functions: Sequence[Function], *, several: bool
) -> str:
    """Answers that are any text; but where a call begins it has to be one of these functions."""
    functions_rules = _function_rules(tool_format, functions)
    if tool_format.bare:
        # What begins as a call does, without being one, is no text.
        text = 'TEXT: /(?s:.*)/ & ~/(?s:\\s*\\{\\s*"(name|type)".*)/'
        tag = _tag(tool_format.opening, token_ids)
        return "\n".join(["start: call | TEXT", f"call: {tag}? function", text, *functions_rules])
    opening, closing = _tag(tool_format.opening, token_ids), _tag(tool_format.closing, token_ids)
    body = f'"\\n" function "\\n" {closing}'
    if tool_format.opening in token_ids:
        # A token of its own is not matched by text, so text ends where one is.
        rules = [f"call: TEXT {opening} {body}", "REST: TEXT", _TEXT]
    else:
        tag = tool_format.opening
        rules = [
            f"call: before {body}",
            f"before[lazy]: /(?s:.*){tag}/",
            f"REST: /(?s:.*)/ & ~/(?s:.*{tag}.*)/",
        ]
    return "\n".join([f"start: call{'*' if several else '?'} REST", *rules, *functions_rules])


def either_grammar(first: str, second: str) -> str:
    """Answers that follow one of two grammars."""
    return _composed("start: @first | @second", {"first": first, "second": second})


def after_reasoning_grammar(token_ids: TokenIds, answer: str, *, opened: bool) -> str:
    """Answers that may begin with reasoning, after which they follow a grammar.

    opened: the prompt has begun the reasoning, so that it has to be closed.
    """
    if CLOSING in token_ids:
        reasoning = f"reasoning: TEXT {_tag(CLOSING, token_ids)}\n{_TEXT}"
    else:
        reasoning = f"reasoning[suffix={json.dumps(CLOSING)}]: /(?s:.*)/"
    begin = "reasoning gap" if opened else f"({_tag(OPENING, token_ids)} reasoning gap)?"
    return _composed(f"start: {begin} @answer\n{reasoning}\ngap: /\\n{{0,2}}/", {"answer": answer})


def object_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON object that is valid by a schema. Raises InputError as json_schema does."""
    return json_schema({**ANY_OBJECT, **schema})


def _composed(main: str, named: Mapping[str, str]) -> str:
    """A grammar that refers to others as @name."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": main}]
    for name, grammar in named.items():
        if grammar.lstrip().startswith("{"):
            first, *rest = json.loads(grammar)["grammars"]
            grammars += [{**first, "name": name}, *rest]
        else:
            grammars.append({"name": name, "lark_grammar": grammar})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _call_rule(tool_format: ToolFormat, token_ids: TokenIds) -> str:
    if tool_format.bare:
        return "call: function"
    opening, closing = _tag(tool_format.opening, token_ids), _tag(tool_format.closing, token_ids)
    return f'call: {opening} "\\n" function "\\n" {closing}'


def _function_rules(tool_format: ToolFormat, functions: Sequence[Function]) -> list[str]:
    rules = [f"function: {' | '.join(f'function_{place}' for place in range(len(functions)))}"]
    for place, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, {json.dumps(tool_format.arguments_keys[0])}: '
        schema = json.dumps(json.loads(object_grammar(function.schema))["grammars"][0]["json_schema"])
        rules.append(f'function_{place}: {json.dumps(head)} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: %json {schema}")
    return rules


def _tag(tag: str, token_ids: TokenIds) -> str:
    """A tag as a rule holds it: by its token where it has one."""
    token_id = token_ids.get(tag)
    return json.dumps(tag) if token_id is None else f"<[{token_id}]>"
