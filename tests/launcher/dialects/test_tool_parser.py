"""Calls of tools in an answer's text: the same parts however the text is cut, and nothing lost that is no call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest

from paceline.launcher.dialects.parts import Arguments, Call, Content, Part
from paceline.launcher.dialects.tool_formats import HERMES, LLAMA, ToolFormat
from paceline.launcher.dialects.tool_parser import ToolParser

NAMES = ["get_weather", "get", "f-2"]

Said = tuple[str, list[tuple[str, str]]]
"""Content, and names and arguments of the calls."""


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def said(parts: Iterable[Part]) -> Said:
    content = ""
    calls: list[tuple[str, str]] = []
    ids = set()
    for part in parts:
        match part:
            case Content():
                assert part.text
                content += part.text
            case Call():
                assert part.index == len(calls)
                calls.append((part.name, ""))
                ids.add(part.call_id)
            case Arguments():
                assert part.text
                assert part.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    assert len(ids) == len(calls)
    return content, calls


def parse(tool_format: ToolFormat, pieces: Iterable[str], *, several: bool = True) -> Said:
    parser = ToolParser(tool_format, NAMES, several=several)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return said([*parts, *parser.finish()])


TRICKY = [
    "{}",
    '{"city": "Oslo"}',
    '{ "a" : [1, {"b": null}],\n "c": {} }',
    r'{"s": "}{ \"quoted\" ] [ \\", "t": "</tool_call> and <tool_call>"}',
    r'{"s": "\"}"}',
    r'{"s": "\\", "t": {"u": "\\\""}}',
    '{"名": "你好 🫠 é", "e": "\\ud83e\\udee0"}',
]
HERMES_ANSWERS: list[tuple[str, Said]] = [
    ("", ("", [])),
    ("Just text.\n", ("Just text.\n", [])),
    *((hermes("get_weather", arguments), ("", [("get_weather", arguments)])) for arguments in TRICKY),
    ("Let me see.\n\n" + hermes("f-2", "{}"), ("Let me see.", [("f-2", "{}")])),
    (
        hermes("get", '{"a": 1}') + "\n" + hermes("get_weather", "{}") + "\n",
        ("", [("get", '{"a": 1}'), ("get_weather", "{}")]),
    ),
    (hermes("get", "{}") + " Done.\n", (" Done.\n", [("get", "{}")])),
    # Spaced otherwise, and without the last brace or tag, as models write at times.
    ('<tool_call>{"name":"get","arguments":{"a":1}}</tool_call>', ("", [("get", '{"a":1}')])),
    ('<tool_call>{"name":"get","arguments":{"a":1}</tool_call>', ("", [("get", '{"a":1}')])),
    ('<tool_call>{"name": "get", "arguments": {"a": 1}}', ("", [("get", '{"a": 1}')])),
    # Ended early: what had begun stays, what had not is text.
    ('<tool_call>\n{"name": "get", "arguments": {"a": "x', ("", [("get", '{"a": "x')])),
    ('Hm <tool_call>\n{"name": "get", "argu', ('Hm <tool_call>\n{"name": "get", "argu', [])),
    ('<tool_call>\n{"name": "get", "arguments": {"a": 1</tool_call> so', (" so", [("get", '{"a": 1')])),
    # No calls.
    ("a <tool b <<tool_call <", ("a <tool b <<tool_call <", [])),
    (hermes("unknown", "{}"), (hermes("unknown", "{}"), [])),
    (hermes("get", '"text"'), (hermes("get", '"text"'), [])),
    ("<tool_call>\nget()\n</tool_call>\nEnd", ("<tool_call>\nget()\n</tool_call>\nEnd", [])),
    ("<tool_call>" + hermes("get", "{}"), ("<tool_call>", [("get", "{}")])),
    ('{"name": "get", "arguments": {}}', ('{"name": "get", "arguments": {}}', [])),
    (
        '<tool_call>\n{"name": "get", "arguments": {}, "id": 5}\n</tool_call>',
        (', "id": 5}\n</tool_call>', [("get", "{}")]),
    ),
]
LLAMA_ANSWERS: list[tuple[str, Said]] = [
    ("  text", ("  text", [])),
    *((llama("get_weather", arguments), ("", [("get_weather", arguments)])) for arguments in TRICKY),
    ("<|python_tag|>" + llama("get", "{}"), ("", [("get", "{}")])),
    ('\n{"type": "function", "name": "get", "parameters": {"a": 1}}', ("", [("get", '{"a": 1}')])),
    ('{"name": "get", "arguments": {"a": 1}}\n', ("", [("get", '{"a": 1}')])),
    (llama("get", "{}") + "; " + llama("f-2", "{}"), ("", [("get", "{}"), ("f-2", "{}")])),
    (llama("get", "{}") + "\n<|python_tag|>" + llama("f-2", "{}"), ("", [("get", "{}"), ("f-2", "{}")])),
    ("Sure.\n<|python_tag|>" + llama("get", "{}"), ("Sure.", [("get", "{}")])),
    (llama("get", "{}") + "; and more", ("; and more", [("get", "{}")])),
    # An answer that is JSON, and code for another tool.
    ('{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', [])),
    ('{"city": "Oslo"}', ('{"city": "Oslo"}', [])),
    ('{"na', ('{"na', [])),
    ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("As in " + llama("get", "{}"), ("As in " + llama("get", "{}"), [])),
]
ANSWERS = [(HERMES, *case) for case in HERMES_ANSWERS] + [(LLAMA, *case) for case in LLAMA_ANSWERS]


@pytest.mark.parametrize(("tool_format", "text", "expected"), ANSWERS)
def test_an_answer_is_read_alike_wherever_it_is_cut(tool_format: ToolFormat, text: str, expected: Said) -> None:
    assert parse(tool_format, [text]) == expected
    assert parse(tool_format, text) == expected
    for cut in range(1, len(text)):
        assert parse(tool_format, [text[:cut], text[cut:]]) == expected, text[:cut]


@pytest.mark.parametrize(("tool_format", "write"), [(HERMES, hermes), (LLAMA, llama)])
def test_a_name_comes_before_its_arguments_and_arguments_as_they_are_written(
    tool_format: ToolFormat, write: Callable[[str, str], str]
) -> None:
    text = write("get", '{"a": 12}')
    parser = ToolParser(tool_format, NAMES, several=True)
    events = [part for character in text for part in parser.feed(character)]
    assert isinstance(events[0], Call)
    assert [part.text for part in events[1:] if isinstance(part, Arguments)] == list('{"a": 12}')


def test_content_is_not_held_back_longer_than_it_may_be_a_tag() -> None:
    parser = ToolParser(HERMES, NAMES, several=True)
    shown = [said(parser.feed(piece))[0] for piece in ("I ", "see <", "b> or <tool", "box> ok")]
    assert shown == ["I", " see", " <b> or", " <toolbox> ok"]


def test_of_a_single_call_nothing_is_read_after_its_arguments() -> None:
    text = "a " + hermes("get", "{}") + " b " + hermes("get", "{}")
    for pieces in ([text], text):
        assert parse(HERMES, pieces, several=False) == ("a", [("get", "{}")])
    parser = ToolParser(HERMES, NAMES, several=False)
    parser.feed('a <tool_call>{"name": "get", "arguments": {"x": ')
    assert not parser.done
    parser.feed("2}")
    assert parser.done


@pytest.mark.parametrize("arguments", TRICKY)
def test_arguments_that_are_json_stay_json(arguments: str) -> None:
    _, [(_, text)] = parse(HERMES, hermes("get", arguments))
    assert json.loads(text) == json.loads(arguments)
