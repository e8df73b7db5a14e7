"""From an answer's token ids to its text and its parts, while they come in."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launcher.answer_text import AnswerText
from paceline.launcher.dialects.answer_parser import AnswerParser
from paceline.launcher.dialects.parts import Part


class AnswerReader:
    """Reads one answer; with a parser as parts, without one as plain text."""

    __slots__ = ("_last_reasoning_token", "_num_tokens", "_parser", "_text", "ended")

    def __init__(self, text: AnswerText, parser: AnswerParser | None = None) -> None:
        self._text = text
        self._parser = parser
        self._num_tokens = 0
        self._last_reasoning_token = 0
        """How many tokens there were when what came next could still be reasoning."""
        self.ended = False
        """Whether the answer is over for another reason than the engine's: a stop text, or its one call."""

    @property
    def stop_text(self) -> str | None:
        """The stop text that was met."""
        return self._text.stop_text

    @property
    def num_calls(self) -> int:
        """Calls of tools that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the answer's reasoning, its tags included."""
        return self._last_reasoning_token if self._parser is not None and self._parser.has_reasoned else 0

    def stop_reason(self, stop_token: int | None) -> int | str | None:
        """The caller's own stop text or stop token id that ended the answer."""
        return self.stop_text or self._text.stop_token(stop_token)

    def feed(self, token_ids: Sequence[int], *, last: bool, stop_token: int | None) -> tuple[str, Sequence[Part]]:
        """What is new with these tokens: text where there is no parser, or else parts."""
        if self._parser is None:
            text = self._text.feed(token_ids, last=last, stop_token=stop_token)
            self.ended = self._text.stop_text is not None
            return text, ()
        parts: list[Part] = []
        rest = list(token_ids)
        # One by one, since it is counted which of them were reasoning.
        while len(rest) > 1 and self._parser.may_reason and not self.ended:
            parts += self._read(self._parser, [rest.pop(0)], last=False, stop_token=None)
        parts += self._read(self._parser, rest, last=last, stop_token=stop_token)
        return "", parts

    def _read(self, parser: AnswerParser, token_ids: list[int], *, last: bool, stop_token: int | None) -> list[Part]:
        if self.ended:
            return []
        self._num_tokens += len(token_ids)
        if parser.may_reason:
            self._last_reasoning_token = self._num_tokens
        parts = parser.feed(self._text.feed(token_ids, last=last, stop_token=stop_token))
        if last or self.stop_text is not None:
            parts += parser.finish()
        self.ended = self.stop_text is not None or parser.done
        return parts
