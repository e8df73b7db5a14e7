"""Carries copies out: several threads take pieces in turn and read each to its place, or to a buffer and from there.

A rank never holds more of the checkpoint in host memory than the buffers of staging.py, and a window of a mapped file
for each reader (mapped_columns.py).

The threads share an interpreter. Each call during which a thread gives it away is one after which it may have to wait
for it, for longer than a piece's other work takes; and where all of them wait, each is woken only as the one before it
is done. So the way of most pieces has one such call, the read, pieces are not small, and nobody else works meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from paceline.model.checkpoint_files import StoredTensor
from paceline.model.coverage import Coverage
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.finite_values import describe_not_finite, not_finite
from paceline.model.parameter import Copy
from paceline.model.pinned_copies import pinned_copies_on
from paceline.model.staging import PIECE_BYTES, Buffer, StagingMemory

FAULT_GRACE_S = 2.0
"""How long a rank reads on once any rank met a fault, to report more than the first."""
LOOK_EVERY_S = 1.0
"""How often the caller's thread, which does not read, tells of new bytes and looks at new values: a long load ends soon
after a fault, and one of less than that looks once, at its end."""


class StopFlag(Protocol):
    """Set once any rank has met a fault. A threading.Event is one, for a rank alone."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


class ShardReader:
    """The work of one rank and what its threads share."""

    def __init__(
        self,
        copies: Sequence[Copy],
        staging: StagingMemory,
        coverage: Coverage,
        stop: StopFlag,
        on_bytes: Callable[[int], object],
    ) -> None:
        """coverage is told of all writes at the end; on_bytes of new bytes now and then, by the caller's thread."""
        device = staging.device
        # Copies come after what the caller has begun, and what readers compute on the device before they are copied.
        self._stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
        self._checks = None if device.type == "cpu" else torch.cuda.Stream(device)
        """Where values are looked at, so that no copy waits for it."""
        self._pinned_copies = None if self._stream is None else pinned_copies_on(self._stream)
        self._coverage = coverage
        self._stop = stop
        self._on_bytes = on_bytes
        self._transfers = [_Transfer(copy) for copy in copies]
        # Deques, since threads may take from one without a lock.
        self._queue = deque((transfer, *run) for transfer in self._transfers for run in transfer.runs)
        # A piece is larger than PIECE_BYTES where a single row is.
        largest = max((transfer.row_bytes * transfer.runs[0][1] for transfer in self._transfers), default=0)
        self._staging = staging
        self._slots = deque(_Slot(buffer, self._stream) for buffer in staging.buffers(largest))
        """In the order in which what is in them will have left them; never empty, since each reader takes one."""
        self._one_at_a_time = threading.Lock()
        self._untold: deque[int] = deque()
        """Bytes of pieces that on_bytes has not heard of."""
        self._faults: dict[str, str] = {}
        self._deadline: float | None = None
        self._abandoned = False

    def run(self) -> list[str]:
        """Read everything; after a fault on any rank, as much as there is still time for.

        The result is one fault for each tensor that has one: values that are not finite, or not once they have the
        parameter's type, and files that cannot be read. Raises LoadingStopped where only other ranks met any.
        """
        try:
            self._read_in_threads()
            self._check()
        finally:
            if self._stream is not None:
                self._stream.synchronize()  # nobody else knows that buffers are in use until then
        for transfer in self._transfers:
            for part in transfer.parts(transfer.placed):
                self._coverage.record(part)
        if self._deadline is not None and not self._faults:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return [fault for _, fault in sorted(self._faults.items())]

    def _read_in_threads(self) -> None:
        try:
            readers = self._staging.read(self._read)
            while wait(readers, LOOK_EVERY_S).not_done:
                self._tell()
                self._check()
        except BaseException:
            self._abandoned = True
            self._staging.end_reading()  # the caller closes the files
            raise
        self._tell()
        for reader in readers:
            reader.result()

    def _tell(self) -> None:
        self._on_bytes(sum(self._untold.popleft() for _ in range(len(self._untold))))

    def _read(self) -> None:
        """One reader: take pieces as long as there are any and there is time."""
        try:
            with self._current(self._stream):
                while not self._is_over():
                    try:
                        transfer, start, stop = self._queue.popleft()
                    except IndexError:
                        return
                    try:
                        self._place(transfer, start, stop)
                    except CheckpointError as error:
                        self._report(transfer.copy, str(error))
                    else:
                        transfer.placed.append((start, stop))
                        self._untold.append((stop - start) * transfer.row_bytes)
        except BaseException:
            self._abandoned = True
            raise

    @staticmethod
    def _current(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """What this thread runs within is on that stream; each thread has a current one of its own."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _is_over(self) -> bool:
        if self._deadline is None and self._stop.is_set():
            self._deadline = time.monotonic() + FAULT_GRACE_S
        return self._abandoned or (self._deadline is not None and time.monotonic() > self._deadline)

    def _place(self, transfer: _Transfer, start: int, stop: int) -> None:
        """Bring rows to their place; on a GPU they are there for what comes later on the stream."""
        begin, end = start * transfer.row_bytes, stop * transfer.row_bytes
        if transfer.stored is not None and transfer.memory is not None:
            transfer.stored.read_rows(start, transfer.memory[begin:end])
            return
        slot = self._slots.popleft()
        try:
            slot.wait()
            if transfer.stored is not None and self._pinned_copies is not None:
                transfer.stored.read_rows(start, slot.memory[: end - begin])
                self._pinned_copies.start(transfer.address + begin, slot.address, end - begin, slot.done_handle)
            else:
                part = transfer.copy.rows(start, stop)
                values = part.tensor.read(part.source, slot.buffer)
                with self._one_at_a_time:  # torch's threads and the driver do not do more of these at once
                    _copy(values, part.destination)
                slot.record()
        finally:
            self._slots.append(slot)

    def _check(self) -> None:
        """Look at the values of what has come into its place since this was last done."""
        parts = [part for transfer in self._transfers for part in transfer.take_unchecked()]
        if self._checks is not None and self._stream is not None:
            self._checks.wait_stream(self._stream)  # their copies have begun
        with self._current(self._checks):
            for part in not_finite(parts):
                self._report(part, describe_not_finite(part))

    def _report(self, copy: Copy, fault: str) -> None:
        self._faults.setdefault(copy.tensor.name, fault)  # in one step, so that several threads may
        self._stop.set()


class _Transfer:
    """A copy that is carried out in pieces: runs of its rows, each a start and a stop."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.row_bytes = copy.num_bytes // copy.num_rows
        """As stored."""
        self.runs = list(copy.runs(PIECE_BYTES))
        self.placed: list[tuple[int, int]] = []
        """Runs that were written; only ever appended to, by any thread."""
        self._checked = 0
        tensor, destination = copy.tensor, copy.destination
        same = tensor.dtype == destination.dtype and destination.is_contiguous()
        self.stored = tensor.box(copy.source) if same and isinstance(tensor, StoredTensor) else None
        """The source, where its bytes can go to the parameter one after the other as they are."""
        self.address = destination.data_ptr()
        on_cpu = self.stored is not None and destination.device.type == "cpu"
        self.memory = destination.view(-1).view(torch.uint8).numpy() if on_cpu else None
        """The bytes of the destination, where they can be read to directly."""

    def take_unchecked(self) -> list[Copy]:
        """What was written since this was last asked."""
        runs = self.placed[self._checked :]
        self._checked += len(runs)
        return self.parts(runs)

    def parts(self, runs: Sequence[tuple[int, int]]) -> list[Copy]:
        """Runs as parts of the copy, few where they follow each other: a part takes a few calls to the driver."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            first = joined.pop()[0] if joined and joined[-1][1] == start else start
            joined.append((first, stop))
        return [self.copy.rows(start, stop) for start, stop in joined]


class _Slot:
    """A buffer, and the event after which it may be read into again."""

    buffer: torch.Tensor
    memory: npt.NDArray[np.uint8]
    address: int
    done_handle: int
    """For PinnedCopies; on a GPU alone."""

    def __init__(self, buffer: Buffer, stream: torch.cuda.Stream | None) -> None:
        self._future: Buffer | None = buffer
        self._stream = stream
        self._done = None if stream is None else torch.cuda.Event()

    def wait(self) -> None:
        """Until the buffer is there, and what was last read into it has left it."""
        if self._future is not None:
            self.buffer = self._future.result()
            self.memory, self.address = self.buffer.numpy(), self.buffer.data_ptr()
            self._future = None
            if self._done is not None:
                self.record()
                self.done_handle = self._done.cuda_event  # there is none before it was recorded
        if self._done is not None and not self._done.query():  # to ask keeps the interpreter
            self._done.synchronize()

    def record(self) -> None:
        """What was begun until now has to end before the buffer is free."""
        if self._done is not None:
            self._done.record(self._stream)


def _copy(values: torch.Tensor, destination: torch.Tensor) -> None:
    """Begin to copy what was read to its place, on the current stream."""
    if values.dtype != destination.dtype or not destination.is_contiguous():
        # Over to the device first: a copy that also casts would do so on the CPU, and wait for it.
        values = values.to(destination.device, non_blocking=True)
    destination.copy_(values, non_blocking=True)
