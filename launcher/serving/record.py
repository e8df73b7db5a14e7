"""What is known of one HTTP request, for its log line: one JSON object, without what the client wrote."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

LOGGER = logging.getLogger("paceline.serving.requests")


@dataclass(slots=True)
class RequestRecord:
    """Filled while the request is served."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    """Of an answer: token counts, finish reasons, and the prompts where they are to be logged."""
    error: str | None = None
    """What the client was told."""

    def log(self) -> None:
        """Write the line."""
        line = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
            **self.answer,
        }
        if self.error is not None:
            line["error"] = self.error
        LOGGER.info(json.dumps(line))


def record_of(request: Request) -> RequestRecord:
    """The record that the gate has made for this request."""
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record
