"""What is known of one HTTP request, for its log line and its trace, without what the client wrote."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from paceline.launcher.serving.errors import ApiError

if TYPE_CHECKING:
    from paceline.launcher.serving.answers import Answers


@dataclass(slots=True)
class RequestRecord:
    """Filled while the request is served."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str | None = None
    """The one of the served names that the client used; None where it used none, or no served one."""
    answers: Answers | None = None
    """Where the request came as far as that."""
    trace_id: str | None = None
    """Of its trace, once it has ended, where there are traces."""
    error: ApiError | None = None
    """What the client was told, or would have been, had it not left."""

    def log_fields(self, *, with_prompts: bool) -> dict[str, Any]:
        """What the request's log line says of it; with_prompts: its prompts too."""
        fields = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
        }
        if self.answers is not None:
            fields |= self.answers.log_fields(with_prompts)
        if self.trace_id is not None:
            fields["trace_id"] = self.trace_id
        if self.error is not None:
            fields["error"] = self.error.message
        return fields


def record_of(request: Request) -> RequestRecord:
    """The record that the gate has made for this request."""
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record
