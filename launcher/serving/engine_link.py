"""The engine as the HTTP process sees it: an EngineApi whose engine is in another process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import zmq
import zmq.asyncio

from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.events import CoordinatorStats, RequestEvent
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.view import EngineView
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.messages import (
    Abort,
    AskStats,
    AskView,
    Drain,
    EngineFailed,
    EngineReady,
    Message,
    News,
    Refused,
    Stats,
    Submit,
    View,
    decode,
    encode,
)

LAST_WORDS_SECONDS = 2
"""For telling clients that the engine is gone."""

MESSAGES_AT_ONCE = 64
"""Messages taken before others have a turn: who is behind the engine must not keep its clients waiting to catch up."""

READERS_AT_ONCE = 32
"""Requests whose news are read before others have a turn: about half a millisecond, so that a new client is not kept
waiting until all streams have their token."""


class _Mailbox:
    """What has come for one request and was not read yet. One reader."""

    __slots__ = ("_events", "_loop", "_waiting", "error", "is_due", "was_read")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: list[RequestEvent] = []
        self._waiting: asyncio.Future[None] | None = None
        self.error: InputError | EngineError | None = None
        """How the request has ended; raised once the news before it are read."""
        self.is_due = False
        """Whether its reader is about to be woken."""
        self.was_read = False

    def put(self, event: RequestEvent) -> None:
        """Leave news."""
        self._events.append(event)

    def wake(self) -> None:
        """Have the reader go on, if it waits."""
        self.is_due = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> RequestEvent:
        """All news that are there, as one, once there are some. Raises the error, once there are none before it."""
        while not self._events:
            if self.error is not None:
                raise self.error
            self._waiting = self._loop.create_future()
            await self._waiting
        self._waiting = None
        self.was_read = True
        events, self._events = self._events, []
        return events[0] if len(events) == 1 else _joined(events)


class EngineLink:
    """Sends requests to the engine and hands its news to whoever iterates over them. Belongs to one event loop.

    Nothing arrives before `receive` runs.
    """

    def __init__(self, address: str) -> None:
        """address: the ZeroMQ endpoint that the engine is bound to."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Who reads too slowly is the client's connection, which is dealt with there; nothing is dropped here.
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._info: EngineInfo | None = None
        self._failure: str | None = None
        self._keys: dict[str, str] = {}
        """What the engine knows a running request by: never used twice, since its news may come after its end."""
        self._mailboxes: dict[str, _Mailbox] = {}
        """By key."""
        self._due: deque[_Mailbox] = deque()
        """Those whose readers are about to be woken."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.farewell: asyncio.Future[float] = self._loop.create_future()
        """Done once this process is to end, as it is told or since the engine is gone: the seconds that it may take."""
        self.hurry = asyncio.Event()
        """Set once it is told a second time, and is to end at once."""

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine is ready."""
        return self._info

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, once it is."""
        return self._failure

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestEvent]:
        """Run one request; see EngineApi. It is sent with the first step of the iterator.

        Raises InputError where it can never run, EngineError where the engine is gone or not ready yet.
        """
        self._check_usable()
        if request_id in self._keys:
            raise InputError(f"request id {request_id!r} is in use: choose another")
        key = str(next(self._numbers))
        message = encode(Submit(key, prompt_token_ids, params, priority, cache_salt))
        self._keys[request_id] = key
        mailbox = self._mailboxes[key] = _Mailbox(self._loop)
        running = True
        try:
            self._send_bytes(message)
            while running:
                event = await mailbox.take()
                running = event.finish_reason is None
                yield event
        finally:
            if running and mailbox.error is None:
                self.abort(request_id)
            del self._keys[request_id], self._mailboxes[key]

    def abort(self, request_id: str) -> None:
        """End a request; its iterator then ends with finish_reason abort. Unknown ids are left alone."""
        key = self._keys.get(request_id)
        if key is not None and self._failure is None:
            self.send(Abort(key))

    async def stats(self) -> CoordinatorStats:
        """Gauges and counters of now. Raises EngineError where the engine is gone or not ready yet."""
        stats: CoordinatorStats = await self._ask(AskStats)
        return stats

    async def view(self) -> EngineView:
        """What goes on now. Raises EngineError where the engine is gone or not ready yet."""
        view: EngineView = await self._ask(AskView)
        names = {key: request_id for request_id, key in self._keys.items()}
        # Of a request that was left just now, only the engine's key is still known.
        requests = [line._replace(id=names.get(line.id, line.id)) for line in view.requests]
        return dataclasses.replace(view, requests=requests)

    async def _ask(self, question: type[AskStats] | type[AskView]) -> Any:
        self._check_usable()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[number] = answer
        try:
            self.send(question(number))
            return await answer
        finally:
            del self._answers[number]

    def fail(self, reason: str) -> None:
        """The engine is gone: every request, now and later, raises EngineError of this reason. The first one stays."""
        if self._failure is not None:
            return
        self._failure = reason
        for mailbox in self._mailboxes.values():
            mailbox.error = EngineError(reason)
            self._wake(mailbox)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineError(reason))
        if not self.farewell.done():
            self.farewell.set_result(LAST_WORDS_SECONDS)

    async def receive(self) -> None:
        """Take the engine's messages until it is gone."""
        try:
            for number in itertools.count(1):
                self._take(decode(await self._socket.recv()))  # which does not wait where there is a message
                if self._failure is not None:
                    return
                if number % MESSAGES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except EngineError as error:
            self.fail(str(error))

    def send(self, message: Message) -> None:
        """Tell the engine something; never waits."""
        self._send_bytes(encode(message))

    def close(self) -> None:
        """Give the socket back; what was sent still goes out."""
        self._socket.close(linger=1000)
        self._context.term()

    def _send_bytes(self, message: bytes) -> None:
        # Without a high-water mark this is done at once, and the future with it; result() raises what went wrong.
        sent: asyncio.Future[Any] = self._socket.send(message, zmq.NOBLOCK)  # type: ignore[assignment]
        sent.result()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._info is None:
            raise EngineError("the model is still being loaded; try again in a moment")

    def _take(self, message: Message) -> None:
        match message:
            case News():
                self._deliver(message.events)
            case Refused():
                if (mailbox := self._mailboxes.get(message.request_id)) is not None:
                    mailbox.error = InputError(message.error)
                    self._wake(mailbox)
            case Stats():
                self._answer(message.number, message.stats)
            case View():
                self._answer(message.number, message.view)
            case EngineReady():
                self._info = message.info
            case EngineFailed():
                self.fail(message.error)
            case Drain():
                if self.farewell.done():
                    self.hurry.set()
                else:
                    self.farewell.set_result(message.seconds)
            case _:
                raise EngineError(f"the engine sent {type(message).__name__}, which only the HTTP process may say")

    def _answer(self, number: int, content: CoordinatorStats | EngineView) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(content)

    def _deliver(self, events: Sequence[RequestEvent]) -> None:
        """Leave news with their requests; of one whose iterator was closed a few may still be on their way."""
        mailboxes = self._mailboxes
        for event in events:
            mailbox = mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
                if not mailbox.is_due:
                    self._wake(mailbox)

    def _wake(self, mailbox: _Mailbox) -> None:
        """Have its reader woken soon: a client's first token goes before the next ones of others."""
        mailbox.is_due = True
        if not self._due:
            self._loop.call_soon(self._wake_readers)
        if mailbox.was_read:
            self._due.append(mailbox)
        else:
            self._due.appendleft(mailbox)

    def _wake_readers(self) -> None:
        """Wake a few, and the others after all else that is to be done now, sockets included."""
        for _ in range(min(READERS_AT_ONCE, len(self._due))):
            self._due.popleft().wake()
        if self._due:
            self._loop.call_soon(self._wake_readers)


def _joined(events: list[RequestEvent]) -> RequestEvent:
    """Events of one request in one piece: who falls behind the engine catches up by more tokens at once."""
    joined = events[-1]
    joined.token_ids = [token for each in events for token in each.token_ids]
    joined.logprobs = [entry for each in events for entry in each.logprobs]
    joined.prompt_logprobs = events[0].prompt_logprobs
    return joined
