"""Host memory that the pieces of a checkpoint pass through on their way to parameters."""

from __future__ import annotations

import mmap
import os
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
    """Buffers that a rank's readers share, pinned where the device is a GPU; a context, after which nobody uses them.

    To pin memory takes tens of milliseconds for all of them. So it is begun here, for pieces of the usual size, in a
    thread of its own; one by one, so that readers start as soon as there is one.
    """

    def __init__(self, device: torch.device, readers: int) -> None:
        self.readers = readers
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pin-memory")
        self._usual_bytes = PIECE_BYTES
        self._usual = self._begin(self._usual_bytes)

    def __enter__(self) -> StagingMemory:
        return self

    def __exit__(self, *_: object) -> None:
        # It takes as long as to pin, and nobody needs to wait for it; an error, which nobody asks for, is logged.
        self._worker.submit(self._unpin).add_done_callback(Future.result)
        self._worker.shutdown(wait=False)

    def buffers(self, size: int) -> list[Buffer]:
        """One for each of the readers and SPARE_BUFFERS, each of at least that size in bytes.

        RuntimeError or OSError from each, where the system does not give the memory.
        """
        return self._usual if size <= self._usual_bytes else self._begin(size)

    def _begin(self, size: int) -> list[Buffer]:
        size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        return [self._worker.submit(self._allocate, size) for _ in range(self.readers + SPARE_BUFFERS)]

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        # Not torch's pinned memory, which has small pages: to pin them takes longer, and so do reads into them.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # another thread's choice does not count here
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        self._pinned.append(buffer)
        return buffer

    def _unpin(self) -> None:
        for buffer in self._pinned:
            with torch.cuda.device(self._device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
        self._pinned.clear()


def num_readers(ranks: int) -> int:
    """Threads that read at the same time for one of so many ranks of this host: one a processor, up to READERS."""
    return max(1, min(READERS, len(os.sched_getaffinity(0)) // ranks))
