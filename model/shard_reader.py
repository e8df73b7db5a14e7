"""Carries copies out: several threads read files into small buffers, and one copies these into parameters.

A rank never holds more of the checkpoint in host memory than READERS * BUFFERS_PER_READER * PIECE_BYTES, and as much
again and no more of mapped files (mapped_columns.py).

The threads share an interpreter, and wait for it longer than they use it where each makes many short calls. So a reader
makes one long call for each piece, the read. All calls to the GPU's driver are one thread's, which would otherwise
wait for each other there too; copies follow each other on one stream, which is enough to fill the bus.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from paceline.model.coverage import Coverage
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.finite_values import describe_not_finite, not_finite
from paceline.model.parameter import Copy
from paceline.model.staging import PIECE_BYTES, Buffer, StagingMemory, num_readers

FAULT_GRACE_S = 2.0
"""How long a rank reads on once any rank met a fault, to report more than the first."""
CHECK_EVERY_S = 1.0
"""Values are looked at so often, so that a long load ends early; a load of less than that looks once, at its end."""
_COPIES_UNDER_WAY = 2
"""So that the bus has the next one while the thread that starts them sees to the last."""


class StopFlag(Protocol):
    """Set once any rank has met a fault. A threading.Event is one, for a rank alone."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


class ShardReader:
    """The work of one rank and what its threads share."""

    def __init__(
        self,
        copies: Sequence[Copy],
        device: torch.device,
        staging: StagingMemory,
        coverage: Coverage,
        stop: StopFlag,
        on_bytes: Callable[[int], object],
    ) -> None:
        """coverage notes each write; on_bytes is told the bytes of each piece once it is in its place."""
        # Copies come after what the caller has begun, and what readers compute on the device before they are copied.
        self._stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
        self._coverage = coverage
        self._stop = stop
        self._on_bytes = on_bytes
        self._transfers = [_Transfer(copy) for copy in copies]
        # A deque, since threads may take from one without a lock.
        self._queue = deque(_Piece(piece, transfer) for transfer in self._transfers for piece in transfer.pieces)
        # A piece is larger than PIECE_BYTES where a single row is.
        largest = max((transfer.pieces[0].num_bytes for transfer in self._transfers), default=0)
        self._free: SimpleQueue[Buffer | None] = SimpleQueue()
        """Buffers to read into, and None for each reader where there will be no more."""
        for buffer in staging.buffers(largest):
            self._free.put(buffer)
        self._filled: SimpleQueue[_Filled | None] = SimpleQueue()
        """What was read, and None from each reader at its end."""
        self._faults: dict[str, str] = {}
        self._deadline: float | None = None
        self._abandoned = False

    def run(self) -> list[str]:
        """Read everything; after a fault on any rank, as much as there is still time for.

        The result is one fault for each tensor that has one: values that are not finite, or not once they have the
        parameter's type, and files that cannot be read. Raises LoadingStopped where only other ranks met any.
        """
        readers = num_readers()
        with ThreadPoolExecutor(readers, thread_name_prefix="read-weights") as pool:
            futures = [pool.submit(self._read) for _ in range(readers)]
            try:
                self._place(readers)
                for future in futures:
                    future.result()
            except BaseException:
                self._abandoned = True
                for _ in range(readers):
                    self._free.put(None)
                raise
        self._check()
        if self._deadline is not None and not self._faults:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return [fault for _, fault in sorted(self._faults.items())]

    def _read(self) -> None:
        """One reader: take pieces as long as there are any, each into a buffer that is free."""
        try:
            with self._same_stream():
                for piece in self._remaining():
                    buffer = self._free.get()
                    if buffer is None:
                        return
                    try:
                        values = piece.copy.tensor.read(piece.copy.source, buffer.result())
                    except CheckpointError as error:
                        self._report(piece.copy, str(error))
                        self._free.put(buffer)
                    else:
                        self._filled.put(_Filled(piece, values, buffer))
        except BaseException:
            self._abandoned = True
            raise
        finally:
            self._filled.put(None)

    def _same_stream(self) -> AbstractContextManager[object]:
        """A thread has a current stream of its own: make it the one that copies are on."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _remaining(self) -> Iterator[_Piece]:
        """Pieces that no thread has taken yet, until time is up."""
        while not self._is_over():
            try:
                piece = self._queue.popleft()
            except IndexError:
                return
            yield piece

    def _is_over(self) -> bool:
        if self._deadline is None and self._stop.is_set():
            self._deadline = time.monotonic() + FAULT_GRACE_S
        return self._abandoned or (self._deadline is not None and time.monotonic() > self._deadline)

    def _place(self, readers: int) -> None:
        """Copy what is read to its place until so many readers have ended; now and then look at their values."""
        # One reader alone has two buffers, and one of them must become free without that the next is filled.
        most = min(_COPIES_UNDER_WAY, readers)
        events = None if self._stream is None else cycle([torch.cuda.Event() for _ in range(most + 1)])
        under_way: deque[tuple[_Filled, torch.cuda.Event | None]] = deque()
        next_check = time.monotonic() + CHECK_EVERY_S
        while readers:
            filled = self._filled.get()
            if filled is None:
                readers -= 1
                continue
            _start_copy(filled)
            done = None if events is None else next(events)
            if done is not None:
                done.record(self._stream)  # asking for the current stream takes longer than to record
            under_way.append((filled, done))
            if len(under_way) > most:
                self._finish(*under_way.popleft())
            if time.monotonic() > next_check:
                self._check()
                next_check = time.monotonic() + CHECK_EVERY_S
        for each in under_way:
            self._finish(*each)

    def _finish(self, filled: _Filled, done: torch.cuda.Event | None) -> None:
        """Wait until a piece is in its place, enter it into the books, and let its buffer be read into again."""
        if done is not None:
            done.synchronize()
        self._free.put(filled.buffer)
        copy, transfer = filled.piece
        self._coverage.record(copy)
        self._on_bytes(filled.values.nbytes)
        transfer.unchecked.append(copy)

    def _check(self) -> None:
        """Look at the values of what has come into its place since this was last done."""
        for part in not_finite([part for transfer in self._transfers for part in transfer.take_unchecked()]):
            self._report(part, describe_not_finite(part))

    def _report(self, copy: Copy, fault: str) -> None:
        self._faults.setdefault(copy.tensor.name, fault)  # in one step, so that several threads may
        self._stop.set()


class _Transfer:
    """A copy that is carried out in pieces."""

    def __init__(self, copy: Copy) -> None:
        self.pieces = list(copy.pieces(PIECE_BYTES))
        self.unchecked: list[Copy] = []
        """Pieces that are in their places, and whose values nobody has looked at."""
        self._copy = copy

    def take_unchecked(self) -> list[Copy]:
        """What is to be looked at now: one part where it is everything, since each takes a few calls to the driver."""
        parts, self.unchecked = self.unchecked, []
        return [self._copy] if len(parts) == len(self.pieces) else parts


class _Piece(NamedTuple):
    """A part of a transfer that one thread carries out."""

    copy: Copy
    transfer: _Transfer


class _Filled(NamedTuple):
    """A piece that was read."""

    piece: _Piece
    values: torch.Tensor
    """In the buffer, or memory of their own."""
    buffer: Buffer


def _start_copy(filled: _Filled) -> None:
    """Begin to copy what was read to its place, on the current stream."""
    values, destination = filled.values, filled.piece.copy.destination
    if values.dtype != destination.dtype or not destination.is_contiguous():
        # Over to the device first: a copy that also casts would do so on the CPU, and wait for it.
        values = values.to(destination.device, non_blocking=True)
    destination.copy_(values, non_blocking=True)
