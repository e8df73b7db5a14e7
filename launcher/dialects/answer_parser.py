"""An answer's text into its parts: reasoning first, then content and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launcher.dialects.parts import Content, Part
from paceline.launcher.dialects.reasoning import ReasoningSplitter
from paceline.launcher.dialects.tool_parser import ToolParser


class AnswerParser:
    """Parses one answer; without a splitter and a tool parser all of it is content."""

    def __init__(self, reasoning: ReasoningSplitter | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def may_reason(self) -> bool:
        """Whether what comes next may be reasoning."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def has_reasoned(self) -> bool:
        """Whether the answer has a reasoning."""
        return self._reasoning is not None and self._reasoning.found

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def done(self) -> bool:
        """Whether the answer is over, whatever else the model may say."""
        return self._tools is not None and self._tools.done

    def feed(self, text: str) -> list[Part]:
        """The parts that this further text settles."""
        if self._reasoning is None:
            return self._with_calls([Content(text)] if text else [])
        return self._with_calls(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        """The rest, once no more text comes."""
        parts = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return parts if self._tools is None else [*parts, *self._tools.finish()]

    def _with_calls(self, parts: Sequence[Part]) -> list[Part]:
        if self._tools is None:
            return list(parts)
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, Content) else [part]
        return found
