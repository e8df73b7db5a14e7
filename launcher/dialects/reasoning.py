"""Reasoning out of an answer's text: what stands between <think> and </think> at its beginning.

Qwen3 writes both tags itself. Templates of DeepSeek-R1's distillations and of QwQ end with <think>, so that the answer
begins inside.
"""

from __future__ import annotations

from paceline.launcher.dialects.parts import Content, Part, Reasoning
from paceline.launcher.dialects.text_ends import beginning_at_end

OPENING = "<think>"
CLOSING = "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Whether an answer to this rendered prompt, or to one of this end, begins inside the model's reasoning."""
    return prompt.rstrip().endswith(OPENING)


def forbids_reasoning(prompt: str) -> bool:
    """Whether the prompt ends with a reasoning that is over, as templates do that switch it off."""
    return prompt.rstrip().endswith(CLOSING)


class ReasoningSplitter:
    """Splits an answer's text into reasoning and content; the result does not depend on how the text is cut.

    Line breaks at the borders of both are dropped, as templates write them there. A reasoning that is never closed is
    all there is.
    """

    def __init__(self, *, opened: bool) -> None:
        """opened: the prompt's template has written the opening tag."""
        self._held = ""
        self._read = self._read_reasoning if opened else self._read_begin
        self._said = False
        """Whether reasoning, or else content after it, has begun: before that line breaks are dropped."""
        self.found = opened
        """Whether there is a reasoning."""

    @property
    def is_open(self) -> bool:
        """Whether what comes next may be reasoning."""
        return self._read in (self._read_begin, self._read_reasoning)

    def feed(self, text: str) -> list[Part]:
        """The parts that this further text settles."""
        self._held += text
        parts: list[Part] = []
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        if self._read == self._read_reasoning:
            text = text.rstrip("\n")
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _read_begin(self, parts: list[Part]) -> bool:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._held = text[len(OPENING) :]
            self.found = True
            self._read = self._read_reasoning
            return True
        if OPENING.startswith(text):
            return False
        self._read = self._read_content
        return True

    def _read_reasoning(self, parts: list[Part]) -> bool:
        if not self._said:
            self._held = self._held.lstrip("\n")
        end = self._held.find(CLOSING)
        if end >= 0:
            text, self._held = self._held[:end].rstrip("\n"), self._held[end + len(CLOSING) :]
            self._said = False
            self._read = self._read_after
        else:
            text = self._held[: len(self._held) - beginning_at_end(self._held, CLOSING)].rstrip("\n")
            self._held = self._held[len(text) :]
            self._said = self._said or bool(text)
        if text:
            parts.append(Reasoning(text))
        return end >= 0

    def _read_after(self, parts: list[Part]) -> bool:
        """Line breaks between the reasoning and the content."""
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._read = self._read_content
        return True

    def _read_content(self, parts: list[Part]) -> bool:
        text, self._held = self._held, ""
        if text:
            parts.append(Content(text))
        return False
