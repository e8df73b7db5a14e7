"""An engine that computes nothing: it answers every request with tokens at a rate of the benchmark's choice."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import zmq

from paceline.coordinator.block_manager import BlockUsage
from paceline.coordinator.events import CoordinatorStats, RequestEvent, RequestTimings
from paceline.coordinator.step_times import StepTimes
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.messages import (
    Abort,
    AskStats,
    Drain,
    EngineReady,
    FrontReady,
    Message,
    News,
    Stats,
    Submit,
    decode,
    encode,
)

PROBE_PRIORITY = -1
"""A request of this priority is answered at once, beside the steps: what it waits for is the door alone."""


class _Running:
    def __init__(self, submit: Submit, place: int) -> None:
        self.submit = submit
        self.place = place
        self.left = submit.params.max_tokens or 1


class StubEngine(threading.Thread):
    """The engine's end of the link. Each step gives one token to every running request, all in one message."""

    def __init__(self, socket: zmq.Socket[bytes], info: EngineInfo, text: Sequence[int]) -> None:
        """text: token ids that answers repeat."""
        super().__init__(daemon=True)
        self._socket = socket
        self._info = info
        self._text = text
        self._running: dict[str, _Running] = {}
        self._times = StepTimes()
        self._over = threading.Event()
        self.ready = threading.Event()
        """Set once the HTTP process takes requests."""
        self.steps_per_second = 100.0
        self.gather = 0
        """Steps begin once this many requests run."""
        self.late_steps = 0
        """Steps that began more than their own length after their time: the stub could not keep its rate."""

    def stop(self) -> None:
        """Have the HTTP process end, and then this thread."""
        self._over.set()

    def run(self) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            self._take_messages()
            if not self._running or len(self._running) < self.gather:
                self._socket.poll(5)
                due = time.monotonic()
                continue
            self.gather = 0
            wait = due - time.monotonic()
            if wait > 0:
                self._socket.poll(max(1, round(wait * 1000)))
                if time.monotonic() < due:
                    continue
            interval = 1 / self.steps_per_second
            self.late_steps += -wait > interval
            due = max(due, time.monotonic() - 20 * interval) + interval
            self._send(News([self._next(each) for each in list(self._running.values())]))
        self._send(Drain(0.0))

    def _take_messages(self) -> None:
        while self._socket.poll(0):
            message = decode(self._socket.recv())
            match message:
                case Submit():
                    self._begin(message)
                case Abort():
                    self._running.pop(message.request_id, None)
                case FrontReady():
                    self._send(EngineReady(self._info))
                    self.ready.set()
                case AskStats():
                    self._send(Stats(message.number, self._stats()))

    def _begin(self, submit: Submit) -> None:
        running = _Running(submit, len(self._running) % len(self._text))
        if submit.priority == PROBE_PRIORITY:
            while running.left:
                self._send(News([self._next(running)]))
        else:
            self._running[submit.request_id] = running

    def _next(self, running: _Running) -> RequestEvent:
        """The next token of a request."""
        token = self._text[running.place]
        running.place = (running.place + 1) % len(self._text)
        running.left -= 1
        prompt = len(running.submit.prompt_token_ids)
        event = RequestEvent(running.submit.request_id, [token], (), prompt, 0)
        if running.left == 0:
            self._running.pop(running.submit.request_id, None)
            event.finish_reason = "length"
            event.timings = RequestTimings(0.0, 0.0, 0.0, 0.0)
        return event

    def _stats(self) -> CoordinatorStats:
        blocks = BlockUsage(free=self._info.num_blocks, cached=0, used=0)
        return CoordinatorStats(
            waiting=0,
            running=len(self._running),
            blocks=blocks,
            steps=0,
            preemptions=0,
            prompt_tokens=0,
            cached_prompt_tokens=0,
            generated_tokens=0,
            finished={},
            step_seconds=self._times.parts(),
            step_requests=self._times.requests,
            step_tokens=self._times.tokens,
            ranks=(),
        )

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))
