"""What a rank reads a checkpoint with: memory that pieces pass through on their way to parameters, and threads."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

READERS = 12
SPARE_BUFFERS = 4
"""Beyond one for each reader: what is being copied to a GPU meanwhile."""
PIECE_BYTES = 4 << 20
"""Of smaller pieces there are too many: readers would wait for the interpreter. All buffers together fit into the
processor's cache, from which a GPU then takes them, and not from memory."""
_HUGE_PAGE = 2 << 20

Buffer = Future[torch.Tensor]
"""Memory for one piece, uint8; to ask for it waits until it is there."""


class StagingMemory:
    """Buffers of one rank, pinned where its device is a GPU, and the threads that read into them; a context.

    The ranks of a host leave it together, once each has loaded or failed: while one ends threads and unpins memory, the
    system and the driver hold up those that still read.

    To pin memory takes tens of milliseconds for all of it. So it is begun here, for pieces of the usual size, in a
    thread of its own; buffer by buffer, so that readers start as soon as there is one.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        """The device of this rank, which is one of so many of this host."""
        self.device = device
        self.readers = num_readers(ranks)
        self._pinned: list[torch.Tensor] = []
        self._reading = ThreadPoolExecutor(self.readers, thread_name_prefix="read-weights")
        self._pinning = ThreadPoolExecutor(1, thread_name_prefix="pin-memory")
        self._usual_bytes = PIECE_BYTES
        self._usual = self._begin(self._usual_bytes)

    def __enter__(self) -> StagingMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_reading()
        self._usual.clear()
        # It takes as long as to pin, and nobody needs to wait for it; an error, which nobody asks for, is logged.
        self._pinning.submit(self._unpin).add_done_callback(Future.result)
        self._pinning.shutdown(wait=False)

    def buffers(self, size: int) -> list[Buffer]:
        """One for each of the readers and SPARE_BUFFERS, each of at least that size in bytes.

        RuntimeError or OSError from each, where the system does not give the memory.
        """
        return self._usual if size <= self._usual_bytes else self._begin(size)

    def read(self, work: Callable[[], None]) -> list[Future[None]]:
        """Have each reader do this."""
        return [self._reading.submit(work) for _ in range(self.readers)]

    def end_reading(self) -> None:
        """Wait until no reader is at work; none begins any more."""
        self._reading.shutdown(cancel_futures=True)

    def _begin(self, size: int) -> list[Buffer]:
        size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        return [self._pinning.submit(self._allocate, size) for _ in range(self.readers + SPARE_BUFFERS)]

    def _allocate(self, size: int) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        # Not torch's pinned memory, which has small pages: to pin them takes longer, and so do reads into them.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(self.device):  # another thread's choice does not count here
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        self._pinned.append(buffer)
        return buffer

    def _unpin(self) -> None:
        for buffer in self._pinned:
            with torch.cuda.device(self.device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
        self._pinned.clear()


def num_readers(ranks: int) -> int:
    """Threads that read at the same time for one of so many ranks of this host: one a processor, up to READERS."""
    return max(1, min(READERS, len(os.sched_getaffinity(0)) // ranks))
