"""A conversation with a model over /v1/chat/completions: what was said, how it is sampled, and one answer at a time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.launcher.clients.events import DONE, EventParser, event_object
from paceline.launcher.clients.http import HttpClient, Response, TransportError
from paceline.launcher.clients.server import refusal, unreachable
from paceline.launcher.json_text import parse_json

OWN_FIELDS = ("messages", "model", "stream", "stream_options", "n")
"""Fields of a request that are not for /set."""
Show = Callable[[str, bool], None]
"""Takes the next piece of an answer, and whether it is the model's reasoning."""


class AnswerFailed(Exception):
    """There is no whole answer, in words; the conversation can go on."""


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """How fast an answer came."""

    tokens: int | None
    """None where the server did not say."""
    first_seconds: float
    """Until its first text."""
    seconds: float

    def __str__(self) -> str:
        if self.tokens is None:
            return f"{self.seconds:.1f} s"
        after = self.seconds - self.first_seconds
        rate = f", {(self.tokens - 1) / after:.1f} tok/s" if self.tokens > 1 and after > 0 else ""
        return f"{self.tokens} tokens, first after {self.first_seconds:.2f} s{rate}"


class Conversation:
    """What is sent is all that was said so far, without the model's reasoning."""

    def __init__(self, client: HttpClient, model: str, system: str | None) -> None:
        self.model = model
        self.fields: dict[str, Any] = {}
        """Of every request, as /set has them."""
        self._client = client
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the API has them."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*head, *self._turns]

    def reset(self, system: str | None = None) -> None:
        """Forget what was said; a system prompt replaces the one there is."""
        self._turns.clear()
        self._system = self._system if system is None else system or None

    def set(self, text: str) -> None:
        """Have a field sent with each request from now on, of `NAME VALUE`; NAME alone takes it back.

        The server judges name and value. Raises InputError for fields that are not a person's to set.
        """
        found = re.fullmatch(r"(\w+)(?:(?:\s+|\s*=\s*)(.+))?", text.strip(), re.DOTALL)
        if found is None:
            raise InputError(f"write a name and a value, such as temperature 0.2, not {text!r}")
        name, value = found[1], found[2]
        if name in OWN_FIELDS:
            raise InputError(f"{name} cannot be set")
        if value is None:
            self.fields.pop(name, None)
            return
        try:
            self.fields[name] = parse_json(value)
        except ValueError:
            self.fields[name] = value

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises InputError where that cannot be done."""
        try:
            content = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
            path.write_text(content, encoding="utf-8", errors="surrogatepass")
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror or error})") from error

    async def ask(self, text: str, show: Show) -> AnswerTimes:
        """Say something, and show the answer as it comes. What came of an answer that was cut short stays said.

        Raises AnswerFailed; where nothing of the answer came, nothing was said.
        """
        self._turns.append({"role": "user", "content": text})
        answer = _Answer(show)
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        try:
            response = await self._client.post("/v1/chat/completions", json.dumps(body).encode(), answer.feed)
            if response.status != 200:
                raise AnswerFailed(self._refusal(response))
            if answer.error is not None:
                raise AnswerFailed(answer.error)
            return answer.times()
        except TransportError as error:
            raise AnswerFailed(str(unreachable(error, self._client.address))) from error
        finally:
            if answer.text or answer.done:
                self._turns.append({"role": "assistant", "content": answer.text})
            else:
                self._turns.pop()

    def _refusal(self, response: Response) -> str:
        if response.status == 401:
            return str(refusal(response, self._client.address))
        message, param, _ = response.error_fields()
        return f"{message} (/set {param} takes it back)" if param in self.fields else message


class _Answer:
    """An answer as its events add up."""

    def __init__(self, show: Show) -> None:
        self.text = ""
        self.error: str | None = None
        self.done = False
        self._show = show
        self._tokens: int | None = None
        self._start = time.perf_counter()
        self._first: float | None = None
        self._parser = EventParser(self._on_event)

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._parser.feed(data)

    def times(self) -> AnswerTimes:
        """For when it is whole."""
        seconds = time.perf_counter() - self._start
        return AnswerTimes(self._tokens, seconds if self._first is None else self._first, seconds)

    def _on_event(self, data: bytes) -> None:
        if data == DONE:
            self.done = True
            return
        event = event_object(data)
        if event is None:
            self.error = "the answer's stream cannot be read"
            return
        if error := event.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
            return
        if usage := event.get("usage"):
            self._tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                self._say(thought, reasoning=True)
            if text := delta.get("content"):
                self.text += text
                self._say(text, reasoning=False)

    def _say(self, text: str, *, reasoning: bool) -> None:
        if self._first is None:
            self._first = time.perf_counter() - self._start
        self._show(text, reasoning)
