"""Getting an answer to its client, whole or as server-sent events, and noticing that the client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.errors import ApiError, ClientGone, to_api_error
from paceline.launcher.serving.record import RequestRecord

Work = Callable[["Outbox"], Coroutine[Any, Any, None]]

BODY_SEND = "body_send"
"""The key of a request's state that has the server's own send. A response has to begin through all the layers between,
but nothing of its body concerns them, and each would cost a coroutine a token."""

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]


class Outbox:
    """One response: either one JSON object, or events."""

    def __init__(self, send: Send, send_body: Send) -> None:
        """send: for how the response begins; send_body: for what comes then."""
        self._send = send
        self._send_body = send_body
        self._beginning = asyncio.Lock()
        """Choices that run side by side write to the same response; one of them begins it."""
        self._begun = False
        self.started = False
        """Whether a status was sent, or is being sent."""
        self.on_failure: Callable[[ApiError], Awaitable[None]] | None = None
        """How a stream that has begun says that it fails; None says it as the chat's streams do."""

    async def whole(self, content: object) -> None:
        """Send the one object."""
        body = as_json(content)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_body({"type": "http.response.body", "body": body})

    async def event(self, content: object, kind: str | None = None) -> None:
        """Send one event; the first one begins the response, so that what fails before it has a status of its own."""
        name = b"" if kind is None else b"event: %b\n" % kind.encode()
        await self.write(b"%bdata: %b\n\n" % (name, as_json(content)))

    async def end(self, *, mark: bool = True) -> None:
        """End a stream; mark: with the event that says so."""
        await self.write(b"data: [DONE]\n\n" if mark else b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with an error."""
        if self.on_failure is not None:
            await self.on_failure(error)
        else:
            await self.event(error.body())
            await self.end()

    def write(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        """Send what is an event already; more: the stream goes on."""
        message = {"type": "http.response.body", "body": data, "more_body": more}
        return self._send_body(message) if self._begun else self._begin(message)

    async def _begin(self, message: Message) -> None:
        """Begin a stream, and then send this of it."""
        async with self._beginning:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                self._begun = True
        await self._send_body(message)


def as_json(content: object) -> bytes:
    """Compact UTF-8; pydantic's encoder takes a quarter of the time that Python's does."""
    return to_json(content, inf_nan_mode="null")


class Delivery(Response):
    """A response that is worked out while it is sent.

    The work is cancelled when the client leaves, when time is up, and when the server ends.
    """

    def __init__(self, work: Work, record: RequestRecord, timeout: float | None, admission: Admission) -> None:
        super().__init__()
        self._work = work
        self._record = record
        self._timeout = timeout
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises ApiError or ClientGone where it has not begun; later errors become events."""
        outbox = Outbox(send, scope["state"][BODY_SEND])
        try:
            await self._unless_gone(receive, self._within_time(outbox))
        except ClientGone:
            raise
        except Exception as error:
            if not outbox.started:
                raise
            self._record.error = to_api_error(error, self._record.request_id)
            await outbox.fail(self._record.error)

    async def _within_time(self, outbox: Outbox) -> None:
        try:
            async with asyncio.timeout(self._timeout) as timer:
                await self._work(outbox)
        except TimeoutError:
            if not timer.expired():
                raise
            raise ApiError(
                504, f"the answer was not finished within {self._timeout:g} s", code="request_timeout"
            ) from None

    async def _unless_gone(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; as soon as the client leaves cancel it, wait until it has ended, and raise ClientGone."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(_client_leaves(receive))
        try:
            with self._admission.track(working):
                await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.cancelled():
                raise ApiError(503, "the server ended before this answer was finished", code="shutting_down")
            if not working.done():
                raise ClientGone
            working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
