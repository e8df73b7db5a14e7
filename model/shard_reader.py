"""Carries copies out: several threads read files into small buffers, and each buffer's content goes to its parameter.

To a GPU the buffers are pinned, and a thread has two: while one is copied by a stream of the thread's own, the other is
read into. So a rank never holds more of the checkpoint in host memory than READERS * 2 * PIECE_BYTES.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol

import torch

from paceline.model.coverage import Coverage
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.parameter import Copy

READERS = 8
PIECE_BYTES = 8 << 20
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
        copies: Iterable[Copy],
        device: torch.device,
        coverage: Coverage,
        stop: StopFlag,
        on_bytes: Callable[[int], object],
    ) -> None:
        """coverage notes each write; on_bytes is told the bytes of each piece once it is in its place."""
        self._pieces = [piece for copy in copies for piece in copy.pieces(PIECE_BYTES)]
        self._device = device
        self._coverage = coverage
        self._stop = stop
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._queue = iter(self._pieces)
        self._faults: dict[str, str] = {}
        self._deadline: float | None = None
        self._abandoned = False

    def run(self) -> list[str]:
        """Read everything; after a fault on any rank, as much as there is still time for.

        The result is one fault for each tensor that has one: values that are not finite, or not once they have the
        parameter's type, and files that cannot be read. Raises LoadingStopped where only other ranks met any.
        """
        threads = max(1, min(READERS, len(os.sched_getaffinity(0)), len(self._pieces)))
        with ThreadPoolExecutor(threads, thread_name_prefix="read-weights") as pool:
            futures = [pool.submit(self._read) for _ in range(threads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._abandoned = True
                raise
        if self._deadline is not None and not self._faults:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return [fault for _, fault in sorted(self._faults.items())]

    def _read(self) -> None:
        """One thread: take pieces as long as there are any, in turns through two buffers."""
        try:
            size = max((piece.num_bytes for piece in self._pieces), default=0)
            buffers = [_Buffer(size, self._device) for _ in range(2)]
            for turn, piece in enumerate(self._remaining()):
                buffer = buffers[turn % 2]
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
    """Host memory for one piece on its way to a parameter."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._extremes = torch.empty(2, dtype=torch.float32, pin_memory=on_gpu)
        self._device = device
        self._piece: Copy | None = None
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(device)
            # The parameters were filled with zeros on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def start(self, piece: Copy) -> None:
        """Read a piece and begin to copy it; CheckpointError where the file cannot be read."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            values = piece.tensor.read(piece.source, self._memory)
            destination = piece.destination
            # Over to the device first: a copy that also casts would do so on the CPU, and wait for it.
            destination.copy_(values.to(self._device, non_blocking=True))
            # Not torch.isfinite, which makes a tensor of flags: NaN and infinities all show in the extremes.
            self._extremes.copy_(torch.stack(torch.aminmax(destination)).float(), non_blocking=True)
        self._piece = piece

    def finish(self) -> Copy | None:
        """Wait for the copy that was begun; what it was, or None."""
        if self._stream is not None:
            self._stream.synchronize()
        piece, self._piece = self._piece, None
        return piece

    def is_finite(self) -> bool:
        """Whether all values of the piece that was finished last are finite in the parameter."""
        return all(map(math.isfinite, self._extremes.tolist()))


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
