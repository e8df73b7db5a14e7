"""Texts that end an answer, found in a stream of pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of the stop texts is complete; the result does not depend on how the text is cut.

    Of several stop texts the one that is complete first ends the answer, and of those that end together the longest.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop text that was met."""

    def feed(self, text: str) -> str:
        """The text that is safe to show now: no part of a stop text, unless it was met and is to be included.

        Only the longest end that a stop text begins with is held back. After a match every call returns "".
        """
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        safe = len(text) - self._length_to_hold(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop text."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
