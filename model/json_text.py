"""JSON that others have written, as safetensors headers and indexes hold it: what is wrong is said with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

_MOST_DIGITS = 20
"""Of a whole number: all of 64 bits have no more. Python itself refuses those of thousands, and does not say where."""
_DEEP = 100
"""Levels at which it is said that a text is nested too deeply, where the parser has given up at some more."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


def parse_json(content: bytes) -> Any:
    """The value; ValueError with line and column where there is none, or an object gives a name twice.

    Numbers of more than 64 bits and objects in hundreds of levels are refused, too.
    """
    text = content.decode("utf-8-sig")

    def whole_number(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise json.JSONDecodeError(f"a number of {len(digits)} digits", text, text.index(digits))
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_int=whole_number)
    except RecursionError:
        _refuse_depth(text)


def printable(name: str) -> str:
    """A name as it may stand in a message; one that holds control characters or half ones is quoted and escaped."""
    return name if name.isprintable() else ascii(name)


def _unique_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json itself would keep only the last of two equal names."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"it gives {printable(name)} twice")
        content[name] = value
    return content


def _refuse_depth(text: str) -> NoReturn:
    depth = place = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        place = token.start()
        if depth > _DEEP:
            break
    raise json.JSONDecodeError("it is nested too deeply", text, place) from None
