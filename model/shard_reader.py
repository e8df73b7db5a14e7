"""Carries copies out: several threads read files into small buffers, and each buffer's content goes to its parameter.

A thread has two buffers: while a stream of the thread's own copies one to the GPU, the other is read into. So a rank
never holds more of the checkpoint in host memory than READERS * BUFFERS_PER_READER * PIECE_BYTES, and as much again
and no more of mapped files (mapped_columns.py).

The threads share an interpreter, so what is done for each piece in Python and in calls to the GPU's driver bounds the
rate: a plain copy, the extremes of what was copied, and their way back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Protocol

import torch

from paceline.model.coverage import Coverage
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.parameter import Copy
from paceline.model.staging import BUFFERS_PER_READER, PIECE_BYTES, StagingMemory, num_readers

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
        self._copies = copies
        self._device = device
        self._staging = staging
        self._coverage = coverage
        self._stop = stop
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._queue = (piece for copy in copies for piece in copy.pieces(PIECE_BYTES))
        self._faults: dict[str, str] = {}
        self._deadline: float | None = None
        self._abandoned = False

    def run(self) -> list[str]:
        """Read everything; after a fault on any rank, as much as there is still time for.

        The result is one fault for each tensor that has one: values that are not finite, or not once they have the
        parameter's type, and files that cannot be read. Raises LoadingStopped where only other ranks met any.
        """
        # A piece is larger than that where a single row is.
        largest = max((next(copy.pieces(PIECE_BYTES)).num_bytes for copy in self._copies), default=0)
        threads = num_readers()
        memory = self._staging.buffers(threads * BUFFERS_PER_READER, largest)
        filled = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device).record_event()
        with ThreadPoolExecutor(threads, thread_name_prefix="read-weights") as pool:
            futures = [pool.submit(self._read, memory[number::threads], filled) for number in range(threads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._abandoned = True
                raise
        if self._deadline is not None and not self._faults:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return [fault for _, fault in sorted(self._faults.items())]

    def _read(self, memory: Sequence[torch.Tensor], filled: torch.cuda.Event | None) -> None:
        """One thread: take pieces as long as there are any, in turns through its buffers.

        filled: after which the GPU has filled the parameters with zeros.
        """
        try:
            with _own_stream(self._device, filled):
                buffers = [_Buffer(part, self._device) for part in memory]
                for buffer, piece in zip(cycle(buffers), self._remaining(), strict=False):
                    self._finish(buffer)
                    try:
                        buffer.start(piece)
                    except CheckpointError as error:
                        self._report(piece, str(error))
                for buffer in buffers:
                    self._finish(buffer)
        except BaseException:
            self._abandoned = True
            raise

    def _remaining(self) -> Iterator[Copy]:
        """Pieces that no thread has taken yet, until time is up."""
        while not self._is_over():
            with self._lock:
                piece = next(self._queue, None)
            if piece is None:
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
        if not buffer.is_finite():
            self._report(piece, _describe_bad_value(piece))
        with self._lock:
            self._coverage.record(piece)
            self._on_bytes(piece.num_bytes)

    def _report(self, piece: Copy, fault: str) -> None:
        with self._lock:
            self._faults.setdefault(piece.tensor.name, fault)
        self._stop.set()


class _Buffer:
    """Host memory for one piece on its way to a parameter. For one thread, on whose current stream it copies."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """memory: uint8, pinned where the device is a GPU."""
        self._memory = memory
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._piece: Copy | None = None
        self._extremes: dict[torch.dtype, _Extremes] = {}
        self._latest: _Extremes

    def start(self, piece: Copy) -> None:
        """Read a piece and begin to copy it; CheckpointError where the file cannot be read."""
        values = piece.tensor.read(piece.source, self._memory)
        destination = piece.destination
        if values.dtype != destination.dtype or not destination.is_contiguous():
            # Over to the device first: a copy that also casts would do so on the CPU, and wait for it.
            values = values.to(self._device, non_blocking=True)
        destination.copy_(values, non_blocking=True)
        if destination.dtype not in self._extremes:
            self._extremes[destination.dtype] = _Extremes(destination.dtype, self._device)
        self._latest = self._extremes[destination.dtype]
        self._latest.measure(destination)
        if self._done is not None:
            self._done.record()
        self._piece = piece

    def finish(self) -> Copy | None:
        """Wait for the copy that was begun; what it was, or None."""
        if self._done is not None:
            self._done.synchronize()
        piece, self._piece = self._piece, None
        return piece

    def is_finite(self) -> bool:
        """Whether all values of the piece that was finished last are finite in the parameter."""
        return self._latest.are_finite()


class _Extremes:
    """Smallest and largest of some values: any that is not finite shows in them, as it would in a tensor of flags."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._there = torch.empty(2, dtype=dtype, device=device)
        self._here = torch.empty(2, dtype=dtype, pin_memory=device.type == "cuda")
        self._parts = self._there[0], self._there[1]

    def measure(self, values: torch.Tensor) -> None:
        """Begin on the current stream; the result is there once that has come so far."""
        torch.aminmax(values, out=self._parts)
        self._here.copy_(self._there, non_blocking=True)

    def are_finite(self) -> bool:
        return all(map(math.isfinite, self._here.tolist()))


@contextmanager
def _own_stream(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """A stream of the calling thread's own, current in it, on which everything comes after an event; none on a CPU."""
    if after is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def _describe_bad_value(piece: Copy) -> str:
    """Read a piece again to name the first value that is not finite in the parameter's type."""
    dtype = piece.parameter.dtype
    values = piece.tensor.read(piece.source, torch.empty(piece.num_bytes, dtype=torch.uint8)).cpu()
    flat = int(values.to(dtype).isfinite().logical_not().flatten().to(torch.uint8).argmax())
    place = torch.unravel_index(torch.tensor(flat), values.shape)
    index = [part.start + int(number) for part, number in zip(piece.source, place, strict=True)]
    value = values.flatten()[flat].item()
    what = f"tensor {piece.tensor.name} in {piece.tensor.file_name} holds {value:g} at {index}"
    if math.isfinite(value):
        return f"{what}, beyond {str(dtype).removeprefix('torch.')}; choose another dtype"
    return what
