"""Server-sent events as OpenAI's servers send them: one `data:` line an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.launcher.json_text import parse_json

DONE = b"[DONE]"
"""The event that ends a stream."""


class EventParser:
    """Cuts a stream of bytes into events; comments, other fields and empty lines are passed over."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, and hand on the events that end in them."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())


def event_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that an event holds; None where it holds none."""
    try:
        event = parse_json(data)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
