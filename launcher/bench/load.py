"""Sending a load and writing down what comes: at given times, whatever the server does, or so many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.bench.records import NO_END, RequestRecord
from paceline.launcher.bench.target import Target
from paceline.launcher.clients.http import TransportError

_TIMER_SECONDS = 0.001
"""What uvloop's timers go by."""


class Load:
    """A run of planned requests. Its records are kept as they come, so that a run cut short has them too."""

    def __init__(self, target: Target, *, request_timeout: float) -> None:
        self.records: list[RequestRecord] = []
        """Of all requests that are to be sent, or that were where nobody knows how many there will be."""
        self.left_out = 0
        """Requests of the plan that the model is too short for."""
        self.cpu_seconds = 0.0
        """Of this process, from the start of the run to its end."""
        self._target = target
        self._timeout = request_timeout
        self._start = 0.0

    async def run_when_due(self, plans: Iterable[PlannedRequest]) -> None:
        """Send each request when it is due, and wait for the answers.

        All bodies are made first, so that sending costs no more than that: about 5 bytes of memory a prompt token. When
        cancelled, requests that run are dropped, and their records stay as they are.
        """
        self.records = [RequestRecord(plan) for plan in self._fitting(plans)]
        bodies = [self._target.body(record.plan) for record in self.records]
        with self._clock():
            async with asyncio.TaskGroup() as group:
                for record, body in zip(self.records, bodies, strict=True):
                    await self._wait_until(record.plan.due)
                    group.create_task(self._send(record, body))

    async def run_in_turn(
        self, plans: Iterable[PlannedRequest], concurrency: int, *, duration: float | None = None
    ) -> None:
        """Keep so many requests running until there are no more, or the duration is over (seconds)."""
        waiting = self._fitting(plans)

        async def sender() -> None:
            for plan in waiting:
                if duration is not None and self.seconds >= duration:
                    return
                record = RequestRecord(plan)
                self.records.append(record)
                await self._send(record, self._target.body(plan))

        with self._clock():
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(sender())

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    async def _wait_until(self, due: float) -> None:
        """Where it is late already this still lets what comes of running answers be looked at."""
        await asyncio.sleep(0)
        # uvloop's timers may go off early, and a request must not be sent before its time.
        while (left := due - self.seconds) > 0:
            await asyncio.sleep(max(left, _TIMER_SECONDS))

    def _fitting(self, plans: Iterable[PlannedRequest]) -> Iterator[PlannedRequest]:
        for plan in plans:
            if self._target.fits(plan):
                yield plan
            else:
                self.left_out += 1

    @contextmanager
    def _clock(self) -> Iterator[None]:
        self._start, cpu_start = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.cpu_seconds = time.process_time() - cpu_start

    async def _send(self, record: RequestRecord, body: bytes) -> None:
        record.sent = self.seconds

        def take(data: bytes) -> None:
            record.feed(data, self.seconds)

        try:
            async with asyncio.timeout(self._timeout):
                response = await self._target.client.post(self._target.path, body, take)
            if response.status != 200:
                code = response.error_fields()[2]
                record.error = f"HTTP {response.status}" + (f" {code}" if code else "")
            elif not record.done:
                record.error = record.error or NO_END
        except TransportError as error:
            record.error = error.kind
        except TimeoutError:
            record.error = f"no whole answer within {self._timeout:g} s"
        record.ended = self.seconds
