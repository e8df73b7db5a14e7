"""The terminal: what a person writes, with a history, and answers in a form that cannot play tricks with the screen."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from paceline.coordinator.errors import InputError
from paceline.launcher.default_model import cache_folder

QUOTES = '"""'
"""A message between two of these may have several lines."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_KEPT_LINES = 1000
_REMOVED = dict.fromkeys({*range(32), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
"""Characters that a terminal obeys instead of showing them."""


class Terminal:
    """Reads messages and shows answers. Where it is no terminal but a pipe or a file, answers come out plain."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self.interactive = source.isatty() and sink.isatty()
        self._source = source
        self._sink = sink
        self._dim = False
        self._at_line_start = True

    def read(self) -> str | None:
        """The next message or command; None at the end of the input. Raises KeyboardInterrupt for Ctrl-C."""
        line = self._read_line("> ")
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            line = self._read_line(". ")
            if line is None:
                return text
            text += f"\n{line}"
        return text.rstrip()[: -len(QUOTES)].strip("\n")

    def read_all(self) -> str:
        """The whole input as one message. Raises InputError where it is no text."""
        with _as_text():
            return self._source.read()

    def _read_line(self, prompt: str) -> str | None:
        if not self.interactive:
            with _as_text():
                line = self._source.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None

    def show(self, text: str, reasoning: bool) -> None:
        """The next piece of an answer; its reasoning dim, and only where a person looks."""
        if not self.interactive:
            if not reasoning:
                self._write(text)
            return
        if reasoning != self._dim:
            if self._dim:
                self._write("\n" if self._at_line_start else "\n\n")
            self._sink.write(_DIM if reasoning else _PLAIN)
            self._dim = reasoning
        self._write(text.translate(_REMOVED))

    def end_answer(self, note: str) -> None:
        """The answer is over; the note is for a person who looks."""
        if not self._at_line_start:
            self._write("\n")
        if self.interactive:
            self._sink.write(f"{_PLAIN}{_DIM}{note}{_PLAIN}\n")
        self._dim = False
        self._sink.flush()

    def tell(self, words: str) -> None:
        """Something of the program's own, to whoever looks after it."""
        if self.interactive:
            self._write(f"{words}\n")
        else:
            print(f"paceline: {words}", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if text:
            self._sink.write(text)
            self._sink.flush()
            self._at_line_start = text.endswith("\n")


@contextmanager
def _as_text() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"the input is no {error.encoding} text") from error


@contextmanager
def history() -> Iterator[None]:
    """Lines that a person wrote, kept from one run to the next where the cache folder can be written."""
    import readline

    try:
        path = cache_folder() / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.read_history_file(path)
    except (OSError, InputError):  # a history is a convenience: without one a chat goes on as well
        yield
        return
    readline.set_history_length(_KEPT_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
