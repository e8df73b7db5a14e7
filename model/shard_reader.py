"""Carries copies out: several threads read files into small buffers, and each buffer's content goes to its parameter.

A thread has two buffers: while a stream of the thread's own copies one to the GPU, the other is read into. So a rank
never holds more of the checkpoint in host memory than READERS * BUFFERS_PER_READER * PIECE_BYTES, and as much again
and no more of mapped files (mapped_columns.py).

The threads share an interpreter, so what is done for each piece in Python and in calls to the GPU's driver bounds the
rate: a read, a plain copy and an event. The thread that started them meanwhile checks what is complete.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from paceline.model.coverage import Coverage
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.finite_values import describe_not_finite, not_finite
from paceline.model.parameter import Copy
from paceline.model.staging import PIECE_BYTES, StagingMemory, num_readers

FAULT_GRACE_S = 2.0
"""How long a rank reads on once any rank met a fault, to report more than the first."""


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
        self._device = device
        self._staging = staging
        self._coverage = coverage
        self._stop = stop
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._transfers = [_Transfer(copy) for copy in copies]
        # A deque, since threads may take from one without a lock.
        self._queue = deque(_Piece(piece, transfer) for transfer in self._transfers for piece in transfer.pieces)
        # A piece is larger than PIECE_BYTES where a single row is.
        self._largest = max((transfer.pieces[0].num_bytes for transfer in self._transfers), default=0)
        self._complete: SimpleQueue[Copy | None] = SimpleQueue()
        """Copies to be checked, and None from each thread at its end."""
        self._faults: dict[str, str] = {}
        self._deadline: float | None = None
        self._abandoned = False

    def run(self) -> list[str]:
        """Read everything; after a fault on any rank, as much as there is still time for.

        The result is one fault for each tensor that has one: values that are not finite, or not once they have the
        parameter's type, and files that cannot be read. Raises LoadingStopped where only other ranks met any.
        """
        threads = num_readers()
        filled = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device).record_event()
        with ThreadPoolExecutor(threads, thread_name_prefix="read-weights") as pool:
            futures = [pool.submit(self._read, number, filled) for number in range(threads)]
            try:
                self._check_while_reading(threads)
                for future in futures:
                    future.result()
            except BaseException:
                self._abandoned = True
                raise
        # After a fault some were read in part. The rest of them is zero still, which is finite.
        self._check([transfer.copy for transfer in self._transfers if transfer.missing])
        if self._deadline is not None and not self._faults:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return [fault for _, fault in sorted(self._faults.items())]

    def _check_while_reading(self, readers: int) -> None:
        """Check copies as they become complete, all that wait at once, until so many threads have ended."""
        while readers:
            entries = [self._complete.get()]
            while not self._complete.empty():  # nobody else takes from it
                entries.append(self._complete.get())
            copies = [entry for entry in entries if entry is not None]
            readers -= len(entries) - len(copies)
            self._check(copies)

    def _check(self, copies: Sequence[Copy]) -> None:
        for part in not_finite(copies):
            self._report(part, describe_not_finite(part))

    def _read(self, number: int, filled: torch.cuda.Event | None) -> None:
        """One thread: take pieces as long as there are any, in turns through its buffers.

        filled: after which the GPU has filled the parameters with zeros.
        """
        try:
            with _own_stream(self._device, filled) as stream:
                buffers = [_Buffer(memory, stream) for memory in self._staging.buffers(number, self._largest)]
                for buffer, piece in zip(cycle(buffers), self._remaining(), strict=False):
                    self._finish(buffer)
                    try:
                        buffer.start(piece)
                    except CheckpointError as error:
                        self._report(piece.copy, str(error))
                for buffer in buffers:
                    self._finish(buffer)
        except BaseException:
            self._abandoned = True
            raise
        finally:
            self._complete.put(None)

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

    def _finish(self, buffer: _Buffer) -> None:
        """Wait until a buffer's piece is in its place, and enter it into the books."""
        piece = buffer.finish()
        if piece is None:
            return
        with self._lock:
            self._coverage.record(piece.copy)
            self._on_bytes(piece.copy.num_bytes)
            piece.transfer.missing -= 1
            if not piece.transfer.missing:
                self._complete.put(piece.transfer.copy)

    def _report(self, copy: Copy, fault: str) -> None:
        with self._lock:
            self._faults.setdefault(copy.tensor.name, fault)
        self._stop.set()


class _Transfer:
    """A copy that is carried out in pieces, and how many of them are not in their places yet."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.pieces = list(copy.pieces(PIECE_BYTES))
        self.missing = len(self.pieces)


class _Piece(NamedTuple):
    """A part of a transfer that one thread carries out."""

    copy: Copy
    transfer: _Transfer


class _Buffer:
    """Host memory for one piece on its way to a parameter. For one thread, on whose current stream it copies."""

    def __init__(self, memory: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """memory: uint8, pinned where there is a stream; stream: the current one, None where the device is a CPU."""
        self._memory = memory
        self._stream = stream
        self._done = None if stream is None else torch.cuda.Event()
        self._piece: _Piece | None = None

    def start(self, piece: _Piece) -> None:
        """Read a piece and begin to copy it; CheckpointError where the file cannot be read."""
        values = piece.copy.tensor.read(piece.copy.source, self._memory)
        destination = piece.copy.destination
        if values.dtype != destination.dtype or not destination.is_contiguous():
            # Over to the device first: a copy that also casts would do so on the CPU, and wait for it.
            values = values.to(destination.device, non_blocking=True)
        destination.copy_(values, non_blocking=True)
        if self._done is not None:
            self._done.record(self._stream)  # asking for the current stream takes longer than the rest of this line
        self._piece = piece

    def finish(self) -> _Piece | None:
        """Wait for the copy that was begun; what it was, or None."""
        if self._done is not None:
            self._done.synchronize()
        piece, self._piece = self._piece, None
        return piece


@contextmanager
def _own_stream(device: torch.device, after: torch.cuda.Event | None) -> Iterator[torch.cuda.Stream | None]:
    """A stream of the calling thread's own, current in it, on which everything comes after an event; none on a CPU."""
    if after is None:
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield stream
