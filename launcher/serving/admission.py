"""How many answers are accepted at once; the rest are told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.launcher.serving.errors import ApiError, bad_request


class Admission:
    """Counts the answers that are accepted and not yet finished. Used from one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.accepted = 0
        """Answers accepted and not yet finished."""
        self._closed = False
        self._work: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Accept nothing more, since the server is about to end; what was accepted goes on."""
        self._closed = True

    def check_open(self) -> None:
        """Raise ApiError (503) once nothing more is accepted."""
        if self._closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    async def wait_idle(self) -> None:
        """Return once no accepted answer is left."""
        await self._idle.wait()

    @contextmanager
    def track(self, work: asyncio.Future[None]) -> Iterator[None]:
        """Have this work cancelled by cut(), if it is still being done then."""
        self._work.add(work)
        try:
            yield
        finally:
            self._work.discard(work)

    def cut(self) -> int:
        """Cancel all work that is still being done; whoever waits for it tells its client.

        Returns how many accepted answers end so.
        """
        for work in self._work:
            work.cancel()
        return self.accepted

    @contextmanager
    def hold(self, answers: int, param: str) -> Iterator[None]:
        """Hold room for this many answers. Raises ApiError: 429 or 503 for now, 400 naming param for ever."""
        self.check_open()
        if answers > self.limit:
            raise bad_request(f"the request asks for {answers} answers; at most {self.limit} fit", param)
        if self.accepted + answers > self.limit:
            raise ApiError(429, "too many requests are waiting", code="queue_full")
        self.accepted += answers
        self._idle.clear()
        try:
            yield
        finally:
            self.accepted -= answers
            if self.accepted == 0:
                self._idle.set()
