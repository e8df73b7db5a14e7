"""Calls of tools out of an answer's text, while it comes in."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

from paceline.launcher.dialects.parts import Arguments, Call, Content, Part
from paceline.launcher.dialects.text_ends import beginning_at_end
from paceline.launcher.dialects.tool_formats import Shape, ToolFormat

_SPACE = " \t\r\n"
_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')

_FAILED = -1
_UNDECIDED = 0


class ToolParser:
    """Splits an answer's text into content and calls; the result does not depend on how the text is cut.

    A call begins with its name, which must be one of the functions', and its arguments are passed on as they come,
    whatever is in them. What only looks like a call is content. Whitespace between content and a call, and between
    calls, is no part of either.
    """

    def __init__(self, tool_format: ToolFormat, names: Sequence[str], *, several: bool) -> None:
        """names: of the functions that may be called; several: whether more calls than one are taken."""
        self._format = tool_format
        self._several = several
        self._opened = tool_format.headers(names, opened=True)
        self._bare = tool_format.headers(names, opened=False) if tool_format.bare else ()
        # Between two calls without tags there is a semicolon.
        self._bare_again = tuple(((";",), *shape) for shape in (*self._bare, *self._opened)) + self._bare
        self._held = ""
        """Text that is not decided yet."""
        self._space = ""
        """Whitespace at the end of the text so far: content only if more content follows."""
        self._after_call = False
        """Whether nothing but whitespace came since a call."""
        self._read = self._read_begin if tool_format.bare else self._read_text
        self._scanner = _ObjectScanner("")
        self.num_calls = 0
        """Calls that have begun."""
        self.done = False
        """Whether the answer is over since it holds the one call that is taken."""

    def feed(self, text: str) -> list[Part]:
        """The parts that this further text settles."""
        self._held += text
        parts: list[Part] = []
        while not self.done and self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes: a call that had not begun is content."""
        parts: list[Part] = []
        if not self.done and self._read != self._read_tail:
            rest = self._space + self._held
            if rest.strip(_SPACE) or not self._after_call:
                _add_content(parts, rest)
        self._held = self._space = ""
        return parts

    def _read_begin(self, parts: list[Part]) -> bool:
        """The beginning of the answer, or what follows a call, where a call needs no tag."""
        end = _match_any(self._bare_again if self.num_calls else self._bare, self._held)
        if end == _UNDECIDED:
            return False
        if end == _FAILED:
            self._read = self._read_text
        else:
            self._begin_call(parts, end)
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        """Content, up to a tag that may begin a call."""
        start = self._held.find(self._format.opening)
        if start < 0:
            start = len(self._held) - beginning_at_end(self._held, self._format.opening)
            self._say(parts, start)
            return False
        self._say(parts, start)
        self._read = self._read_header
        return True

    def _read_header(self, parts: list[Part]) -> bool:
        """A tag and what follows it, up to the arguments."""
        end = _match_any(self._opened, self._held)
        if end == _UNDECIDED:
            return False
        if end == _FAILED:
            self._say(parts, len(self._format.opening))
            self._read = self._read_text
        else:
            self._begin_call(parts, end)
        return True

    def _begin_call(self, parts: list[Part], end: int) -> None:
        (name,) = _NAME.findall(self._held[:end])
        parts.append(Call(self.num_calls, f"call_{uuid.uuid4().hex}", name))
        self.num_calls += 1
        self._after_call = True
        self._held = self._held[end - 1 :]  # the brace is the arguments' own
        self._space = ""
        self._scanner = _ObjectScanner(self._format.closing[:1])
        self._read = self._read_arguments

    def _read_arguments(self, parts: list[Part]) -> bool:
        end = self._scanner.find_end(self._held)
        text, self._held = self._held[:end], "" if end is None else self._held[end:]
        if text:
            parts.append(Arguments(self.num_calls - 1, text))
        if end is None:
            return False
        self.done = not self._several
        self._read = self._read_tail
        return True

    def _read_tail(self, parts: list[Part]) -> bool:
        """What ends a call; where it is something else, that is content."""
        end = _match_any(self._format.tails(), self._held)
        if end == _UNDECIDED:
            return False
        self._held = self._held[max(end, 0) :]
        self._read = self._read_begin if self._format.bare else self._read_text
        return True

    def _say(self, parts: list[Part], length: int) -> None:
        """So much of the held text is content, but for whitespace at its end, which may be before a call."""
        text, self._held = self._space + self._held[:length], self._held[length:]
        said = text.rstrip(_SPACE)
        self._space = text[len(said) :]
        self._after_call = self._after_call and not said
        _add_content(parts, said)


class _ObjectScanner:
    """Finds the end of a JSON object that comes in pieces, by its braces and quotes alone."""

    def __init__(self, tag_begin: str) -> None:
        """tag_begin: the first character of a tag; outside a string it ends an object that was not closed."""
        self._tag_begin = tag_begin
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str) -> int | None:
        """Where in this piece the object ends; None if it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
            elif character == self._tag_begin:
                return place
        return None


def _add_content(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Content(text))


def _match_any(shapes: Sequence[Shape], text: str) -> int:
    """Where the first of these shapes that the text begins with ends in it.

    _UNDECIDED while the text may still become one, and _FAILED once it cannot.
    """
    ends = (_match(shape, text) for shape in shapes)
    return next((end for end in ends if end != _FAILED), _FAILED)


def _match(shape: Shape, text: str) -> int:
    place = 0
    for choices in shape:
        while place < len(text) and text[place] in _SPACE:
            place += 1
        found = next((choice for choice in choices if text.startswith(choice, place)), None)
        if found is None:
            rest = text[place:]
            return _UNDECIDED if any(choice.startswith(rest) for choice in choices) else _FAILED
        place += len(found)
    return place
